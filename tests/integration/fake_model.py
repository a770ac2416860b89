"""A deterministic stand-in for a language model: a token is a byte, the next one a hash."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

EOS = 0


def tokens_of(text: str) -> list[int]:
    """One token a byte."""
    return list(text.encode())


def chat_tokens(messages: list[dict[str, object]]) -> list[int]:
    """The template: ``role: content`` a line, then the assistant's turn."""
    lines = [f"{message['role']}: {message['content']}\n" for message in messages]
    return tokens_of("".join(lines) + "assistant:")


def next_token(ids: Sequence[int]) -> int:
    """A lower-case letter that depends on every token before it."""
    digest = hashlib.blake2b(array("I", ids).tobytes(), digest_size=4).digest()
    return 97 + int.from_bytes(digest, "little") % 26


def generate(ids: Sequence[int], count: int, eos_at: int | None = None) -> list[int]:
    """``count`` tokens, or fewer: the end token comes at context length ``eos_at``."""
    context = list(ids)
    answer: list[int] = []
    while len(answer) < count:
        token = EOS if eos_at == len(context) else next_token(context)
        answer.append(token)
        context.append(token)
        if token == EOS:
            break
    return answer


def text_of(ids: Sequence[int]) -> str:
    """The text of an answer; the end token has none."""
    return bytes(token for token in ids if token != EOS).decode()
