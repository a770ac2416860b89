"""Whether a model can be opened, asked before an engine starts: vLLM needs a minute to say no.

A folder is looked at. A Hugging Face name is known when the cache has it; else the hub is asked for
its ``config.json``, which ends within seconds whatever the network does.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dualpath.config import ConfigError

_ASK_S: Final = 10.0
_HUB: Final = "https://huggingface.co"
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_TOKENIZERS: Final = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "*.tiktoken",
    "tekken.json",
)  # fmt: skip
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_OWN_TOKENIZER: Final = ("--tokenizer", "--skip-tokenizer-init", "--tokenizer-mode")
_OWN_WEIGHTS: Final = ("--load-format", "--model-loader-extra-config")
_TRUE: Final = frozenset({"1", "true", "yes", "on"})


def check_model(
    model: str,
    *,
    field: str = "model.path",
    revision: str = "",
    extra_args: Sequence[str] = (),
    env: Mapping[str, str] = os.environ,
    ask_s: float = _ASK_S,
) -> None:
    """Refuse a model that no engine could open. Blocking; at most about ``ask_s`` seconds.

    Args:
        model: folder, or Hugging Face name.
        field: opens the error: where the user wrote it.
        revision: of a Hugging Face name; its default branch when empty.
        extra_args: vLLM's, which may bring another tokenizer or other weights.
        env: environment of the engine; only read.

    Raises:
        ConfigError: it cannot be opened; the message says what to change.
    """
    path = Path(model)
    if model and path.is_dir():
        check_folder(path, field=field, extra_args=extra_args)
        return
    if model and path.exists():
        raise ConfigError(f"{field}: {model} is a file; name the folder that config.json lies in")
    if not _NAME.fullmatch(model) or ".." in model:
        hint = "; write the home directory out" if model.startswith("~") else ""
        raise ConfigError(f"{field}: there is no folder {model or repr(model)}{hint}")
    if _is_set(env, "VLLM_USE_MODELSCOPE") or _is_cached(model, revision, env):
        return
    if _is_set(env, "HF_HUB_OFFLINE") or _is_set(env, "TRANSFORMERS_OFFLINE"):
        raise ConfigError(
            f"{field}: {model} is no folder here, nor in the Hugging Face cache ({_cache(env)}), "
            "and HF_HUB_OFFLINE forbids to download it; name a folder"
        )
    _ask(model, revision, field, env, ask_s)


def check_folder(
    folder: Path, *, field: str = "model.path", extra_args: Sequence[str] = ()
) -> None:
    """Refuse a folder that lacks what an engine opens first.

    Raises:
        ConfigError: ``config.json``, tokenizer or weights are missing or cannot be read.
    """
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.exists())
        values = msgspec.json.decode((folder / "config.json").read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{field}: {folder} has no config.json; name a model's folder") from None
    except OSError as error:
        where = error.filename or folder
        raise ConfigError(f"{field}: {where} cannot be read: {error.strerror}") from None
    except ValueError as error:  # of JSON and of UTF-8
        raise ConfigError(f"{field}: {folder}/config.json is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{field}: {folder}/config.json must hold a JSON object")
    for patterns, own, what in (
        (_TOKENIZERS, _OWN_TOKENIZER, "tokenizer (tokenizer.json or tokenizer.model)"),
        (_WEIGHTS, _OWN_WEIGHTS, "weights (*.safetensors)"),
    ):
        if _given(extra_args, own):
            continue
        if not any(Path(name).match(pattern) for name in names for pattern in patterns):
            raise ConfigError(f"{field}: {folder} has no {what}; copy the model there as a whole")


def _given(args: Sequence[str], names: Sequence[str]) -> bool:
    return any(arg.partition("=")[0] in names for arg in args)


def _is_set(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in _TRUE


def _cache(env: Mapping[str, str]) -> Path:
    """Where Hugging Face's library keeps what it has downloaded."""
    if own := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(own).expanduser()
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(env.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _is_cached(model: str, revision: str, env: Mapping[str, str]) -> bool:
    found = _library().try_to_load_from_cache(
        model, "config.json", cache_dir=_cache(env), revision=revision or None
    )
    return isinstance(found, str)


def _library() -> Any:
    """Hugging Face's own: vLLM brings it, so it is here wherever an engine can start. Loaded only
    where a model is no folder, for it takes half a second."""
    return importlib.import_module("huggingface_hub")


def _ask(model: str, revision: str, field: str, env: Mapping[str, str], ask_s: float) -> None:
    """Ask the hub. In a thread: looking a host's name up has no deadline of its own."""
    hub = env.get("HF_ENDPOINT", "").rstrip("/") or _HUB
    answers: list[int | str] = []

    def work() -> None:
        answers.append(_status(model, revision, hub, env.get("HF_TOKEN"), ask_s))

    thread = threading.Thread(target=work, name="dualpath-hub", daemon=True)
    thread.start()
    thread.join(ask_s)
    answer = answers[0] if answers else f"no answer within {ask_s:g} s"
    if answer == 200:
        return
    if answer in (401, 403, 404):
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            f"{field}: {model} is no folder here, and {hub} has no such model{at} for us (HTTP "
            f"{answer}); correct the name, or set HF_TOKEN if it is private or gated"
        )
    reason = f"HTTP {answer}" if isinstance(answer, int) else answer
    raise ConfigError(
        f"{field}: {model} is no folder here, nor in the Hugging Face cache ({_cache(env)}), and "
        f"{hub} cannot be asked: {reason}; name a folder"
    )


def _status(model: str, revision: str, hub: str, token: str | None, timeout_s: float) -> int | str:
    """HTTP status of asking for a model's ``config.json``; or why there is none."""
    library = _library()
    url = library.hf_hub_url(model, "config.json", revision=revision or None, endpoint=hub)
    try:
        library.get_hf_file_metadata(url, token=token or None, timeout=timeout_s)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP library it uses; it is told
        answer = getattr(error, "response", None)
        return int(answer.status_code) if answer is not None else str(error) or repr(error)
    return 200


__all__ = ["check_folder", "check_model"]
