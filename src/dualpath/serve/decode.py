"""The DE's part of an answer, on its way to the client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dualpath.serve.answer import AnswerContext
from dualpath.serve.body import Call
from dualpath.serve.errors import EngineAnswer, PassedThrough
from dualpath.serve.reply import Reply
from dualpath.serve.tempo import Tempo
from dualpath.serve.upstream import Upstream, events


class Progress(Protocol):
    """How far a client has been answered; see ``Turn``."""

    committed: bool
    complete: bool
    reply: Reply
    tempo: Tempo


async def receive(
    upstream: Upstream,
    url: str,
    body: dict[str, Any],
    upstream_id: str,
    context: AnswerContext,
    progress: Progress,
) -> dict[str, Any] | None:
    """Ask the DE and stream its answer to the client, all but the ``[DONE]``.

    Returns:
        The whole answer when it is not streamed: nothing of it has been sent.

    Raises:
        PassedThrough: the DE refused the request.
        EngineAnswer: the DE failed.
    """
    tempo = progress.tempo
    extra_usage = _wants_no_usage(context.call)
    if extra_usage:
        body = {**body, "stream_options": _with_usage(body.get("stream_options"))}
    async with upstream.open(url, body, upstream_id) as response:
        if response.status != 200:
            raise PassedThrough(response.status, await response.read())
        if not context.call.stream:
            whole = context.correct_whole(_whole(await response.read()))
            tempo.tokens = _tokens(whole)
            return whole
        ending = _Ending(context.call.choices)
        async for piece in events(response):
            ready: list[dict[str, Any]] = []
            for event in piece:
                _raise_error(event)
                corrected = context.correct_event(event)
                if corrected is None:
                    continue
                tempo.event(corrected)
                if not corrected.get("choices") and (tokens := _tokens(corrected)) is not None:
                    tempo.tokens = tokens
                    if extra_usage:
                        _without_usage(corrected, ending.chunks)
                        continue
                if not ending.takes(corrected):
                    ready.append(corrected)
            if ready:
                progress.committed = True
                await progress.reply.events(ready)
    if not ending.chunks:
        raise EngineAnswer("the engine's stream ended without a finish reason")
    await send_complete(ending.chunks, progress)
    return None


async def send_complete(chunks: list[dict[str, Any]], progress: Progress) -> None:
    """Send the last chunks of a stream. They do not wait for the turn's blocks to be durable, only
    ``[DONE]`` does: whoever reads the stream has its tokens when they are made."""
    progress.committed = True
    await progress.reply.events(chunks)
    progress.complete = True


async def send_end(whole: dict[str, Any] | None, reply: Reply) -> None:
    """Send what waited for the end of the turn."""
    if whole is None:
        await reply.end_stream()
    else:
        await reply.whole_json(200, whole)


@dataclass(slots=True)
class _Ending:
    """The last chunks, from the one that finishes the last choice on. They wait for the end of the
    engine's stream, which follows at once: the usage may alter them."""

    choices: int
    finished: int = 0
    chunks: list[dict[str, Any]] = field(default_factory=list)

    def takes(self, chunk: dict[str, Any]) -> bool:
        ends = (choice.get("finish_reason") for choice in chunk.get("choices") or ())
        self.finished += sum(end is not None for end in ends)
        if self.finished >= self.choices:
            self.chunks.append(chunk)
            return True
        return False


def _wants_no_usage(call: Call) -> bool:
    """Whether usage is asked of the engine for our own count only.

    Not with several choices: there the engine stamps its fingerprint on each choice's last chunk,
    of which only the last could still be put right.
    """
    return call.stream and call.choices == 1 and not call.include_usage


def _with_usage(options: dict[str, Any] | None) -> dict[str, Any]:
    options = {**(options or {}), "include_usage": True}
    if options.get("continuous_usage_stats") is True:
        options["continuous_usage_stats"] = False  # without include_usage it has no effect
    return options


def _without_usage(closing: dict[str, Any], held: list[dict[str, Any]]) -> None:
    """Leave the usage chunk out. Without it, the engine's fingerprint is in the chunk before."""
    if held and closing.get("system_fingerprint") is not None:
        held[-1]["system_fingerprint"] = closing["system_fingerprint"]


def _tokens(answer: dict[str, Any]) -> int | None:
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else None


def _whole(raw: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise EngineAnswer(f"the engine's answer is no JSON: {error}") from error
    if not isinstance(answer, dict):
        raise EngineAnswer("the engine's answer is no JSON object")
    return answer


def _raise_error(event: dict[str, Any]) -> None:
    error = event.get("error")
    if not isinstance(error, dict):
        return
    code = error.get("code")
    if isinstance(code, int) and 400 <= code < 500:
        raise PassedThrough(code, msgspec.json.encode(event))
    raise EngineAnswer(f"the engine failed: {error.get('message')}")
