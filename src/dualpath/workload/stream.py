"""An answer as it streams in: its tokens, their times, and what can be wrong with it.

A chunk may carry several tokens: the ids it brings (``return_token_ids``) say how many; without
ids a chunk with text counts as one token.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec


class Failure(enum.Enum):
    """Why a request has no usable answer."""

    REFUSED = "refused"
    """HTTP 4xx: the request itself is wrong."""
    SERVER = "server"
    """HTTP 5xx, or an error event in the stream."""
    CONNECTION = "connection"
    """No connection, or it broke."""
    STREAM = "stream"
    """The stream ended early or made no sense."""
    DEADLINE = "deadline"
    """Not over in the time allowed."""
    LENGTH = "length"
    """Another number of tokens than was asked for."""
    NO_IDS = "no_ids"
    """The answer's token ids are needed for the next prompt and were not given."""


class RequestFailed(Exception):
    """A request has no usable answer; the text is one line."""

    def __init__(self, failure: Failure, text: str, *, retry: bool = False) -> None:
        super().__init__(" ".join(text.split()))
        self.failure = failure
        self.retry = retry
        """Whether trying again could help and no token has been counted."""
        self.attempts = 1
        """Tries it took to fail; set by whoever retries."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer.

    Attributes:
        text: all of it.
        token_ids: its tokens, None when the server gives none.
        completion_tokens: how many; from ``usage`` where given, else counted.
        prompt_tokens, cached_tokens: from ``usage``; None when not given.
        finish_reason: as the server says.
        ttft_s: first attempt's start to the first token.
        ttst_s: gap between tokens 1 and 2; None for a single token.
        tpot_s: mean gap after token 2; None with fewer than three tokens.
        total_s: first attempt's start to the end of the stream.
        attempts: tries, 1 without retries.
        headers: the response's own ``x-dualpath-*`` headers.
    """

    text: str
    token_ids: tuple[int, ...] | None
    completion_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    finish_reason: str
    ttft_s: float
    ttst_s: float | None
    tpot_s: float | None
    total_s: float
    attempts: int
    headers: dict[str, str]


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNK: Final = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Stopwatch:
    """Times of one answer's tokens."""

    start_s: float
    tokens: int = 0
    first_s: float = 0.0
    second_s: float = 0.0
    last_s: float = 0.0

    def count(self, tokens: int, now_s: float) -> None:
        """``tokens`` more tokens arrived at ``now_s``."""
        if tokens <= 0:
            return
        if self.tokens == 0:
            self.first_s = now_s
        if self.tokens < 2 <= self.tokens + tokens:
            self.second_s = now_s
        self.tokens += tokens
        self.last_s = now_s

    @property
    def ttft_s(self) -> float:
        """Start to token 1."""
        return self.first_s - self.start_s

    @property
    def ttst_s(self) -> float | None:
        """Token 1 to token 2."""
        return self.second_s - self.first_s if self.tokens >= 2 else None

    @property
    def tpot_s(self) -> float | None:
        """Mean gap from token 2 on."""
        return (self.last_s - self.second_s) / (self.tokens - 2) if self.tokens > 2 else None


@dataclass(slots=True)
class AnswerStream:
    """What one attempt's stream has brought so far. Pure; the caller says what time it is."""

    watch: Stopwatch
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    usage: _Usage | None = None
    finish_reason: str = ""
    done: bool = False

    def take(self, payload: bytes, now_s: float) -> None:
        """One event's payload, arrived at ``now_s``.

        Raises:
            RequestFailed: it is an error, or not a chunk.
        """
        if payload == b"[DONE]":
            self.done = True
            return
        try:
            chunk = _CHUNK.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestFailed(Failure.STREAM, f"an event that is no chunk: {error}") from None
        if chunk.error is not None:
            text = f"error in the stream: {error_text(chunk.error)}"
            raise RequestFailed(Failure.SERVER, text, retry=self.watch.tokens == 0)
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices[:1]:
            text = choice.text or ""
            if choice.delta is not None:
                delta = choice.delta
                text += (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")
            self.text.append(text)
            self.finish_reason = choice.finish_reason or self.finish_reason
            self.ids += choice.token_ids or ()
            arrived = len(choice.token_ids) if choice.token_ids is not None else int(bool(text))
            self.watch.count(arrived, now_s)

    def answer(self, now_s: float, attempt: int, headers: dict[str, str]) -> Answer:
        """The whole answer, once the stream is over.

        Raises:
            RequestFailed: it ended early, empty, or contradicts itself.
        """
        watch, usage = self.watch, self.usage
        if not self.done:
            text = f"the stream ended after {watch.tokens} tokens without [DONE]"
            raise RequestFailed(Failure.STREAM, text, retry=watch.tokens == 0)
        if not watch.tokens:
            raise RequestFailed(Failure.STREAM, "the stream ended without a token", retry=True)
        if usage is not None and self.ids and len(self.ids) != usage.completion_tokens:
            text = f"{len(self.ids)} token ids came, usage says {usage.completion_tokens}"
            raise RequestFailed(Failure.STREAM, text)
        details = usage.prompt_tokens_details if usage is not None else None
        return Answer(
            text="".join(self.text),
            token_ids=tuple(self.ids) if self.ids else None,
            completion_tokens=usage.completion_tokens if usage is not None else watch.tokens,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            cached_tokens=details.cached_tokens if details is not None else None,
            finish_reason=self.finish_reason,
            ttft_s=watch.ttft_s,
            ttst_s=watch.ttst_s,
            tpot_s=watch.tpot_s,
            total_s=now_s - watch.start_s,
            attempts=attempt,
            headers=headers,
        )


def error_text(error: Any) -> str:
    """The message inside an OpenAI error object, or all of it."""
    while isinstance(error, dict):
        error = error.get("error") or error.get("message") or str(error)
    return str(error)
