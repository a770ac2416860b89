"""When an answer's tokens came, as the front sees them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Tempo:
    """Times of one answer's tokens, on the monotonic clock; None until they came.

    A streamed chunk counts when it carries a token. An engine that is ahead of its reader puts
    several tokens into one chunk, so the number of tokens is taken from its usage where it is
    known, and ``chunks`` is a lower bound.

    Attributes:
        first_s: token 1 was at the front.
        second_s: the next chunk with a token came.
        last_s: the last chunk with a token came.
        chunks: chunks that carried tokens.
        tokens: tokens of the answer, all choices together; None while unknown.
    """

    first_s: float | None = None
    second_s: float | None = None
    last_s: float | None = None
    chunks: int = 0
    tokens: int | None = None

    def token(self) -> None:
        """A token, or a chunk of them, is here."""
        now_s = time.monotonic()
        self.chunks += 1
        if self.first_s is None:
            self.first_s = now_s
        elif self.second_s is None:
            self.second_s = now_s
        self.last_s = now_s

    def event(self, event: Mapping[str, Any]) -> None:
        """Look at a chunk of a stream."""
        if any(_has_token(choice) for choice in event.get("choices") or ()):
            self.token()

    @property
    def second_gap_s(self) -> float | None:
        """TTST: from token 1 to token 2."""
        if self.first_s is None or self.second_s is None:
            return None
        return self.second_s - self.first_s

    @property
    def per_token_s(self) -> float | None:
        """TPOT: mean time per token after token 1; None with fewer than two tokens."""
        tokens = self.chunks if self.tokens is None else self.tokens
        if self.first_s is None or self.second_s is None or self.last_s is None or tokens < 2:
            return None
        return (self.last_s - self.first_s) / (tokens - 1)


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Whether a choice of a chunk carries a token; a chat's opening chunk has only the role."""
    if choice.get("finish_reason") is not None or choice.get("text") or choice.get("token_ids"):
        return True
    delta = choice.get("delta") or {}
    return any(value for key, value in delta.items() if key != "role")
