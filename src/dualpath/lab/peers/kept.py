"""Which decode engine still has which conversation's KV. Pure: the caller says what time it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kept:
    """KV that a decode engine keeps after a turn.

    Attributes:
        tokens: what it is of, from the conversation's start.
        params: how another engine asks for it, as the decode engine said.
        until_s: when it may be gone.
    """

    tokens: tuple[int, ...]
    params: Mapping[str, Any]
    until_s: float


class Keeping:
    """All that is kept. Belongs to one event loop."""

    def __init__(self, keep_s: float) -> None:
        """``keep_s``: how long what is added can be asked for."""
        self._keep_s = keep_s
        self._kept: list[Kept] = []

    def add(self, tokens: Sequence[int], params: Mapping[str, Any], now_s: float) -> None:
        """A turn ended and its KV is kept."""
        self._kept.append(Kept(tuple(tokens), params, now_s + self._keep_s))

    def take(self, prompt: Sequence[int], now_s: float) -> Mapping[str, Any] | None:
        """Parameters for the KV of the longest beginning of ``prompt``, or None. It is given once:
        a decode engine frees what has been read."""
        self._kept = [one for one in self._kept if one.until_s > now_s]
        found: Kept | None = None
        for one in self._kept:
            longer = found is None or len(one.tokens) > len(found.tokens)
            if longer and tuple(prompt[: len(one.tokens)]) == one.tokens:
                found = one
        if found is None:
            return None
        self._kept.remove(found)
        return found.params

    def clear(self) -> None:
        """Nothing is asked for any more."""
        self._kept.clear()
