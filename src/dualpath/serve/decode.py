"""The DE's part of an answer, on its way to the client."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from dualpath.serve.answer import AnswerContext
from dualpath.serve.errors import EngineAnswer, PassedThrough
from dualpath.serve.reply import Reply
from dualpath.serve.upstream import Upstream, events


class Progress(Protocol):
    """How far a client has been answered."""

    committed: bool
    reply: Reply


async def receive(
    upstream: Upstream,
    url: str,
    body: dict[str, Any],
    upstream_id: str,
    context: AnswerContext,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Ask the DE and stream its answer to the client, all but the end.

    Returns:
        What is held back until the turn's blocks are durable: the last chunks, from the one that
        finishes the last choice on, or the whole answer when it is not streamed.

    Raises:
        PassedThrough: the DE refused the request.
        EngineAnswer: the DE failed.
    """
    held: list[dict[str, Any]] = []
    finished = 0
    async with upstream.open(url, body, upstream_id) as response:
        if response.status != 200:
            raise PassedThrough(response.status, await response.read())
        if not context.call.stream:
            return [context.correct_whole(_whole(await response.read()))]
        async for event in events(response):
            _raise_error(event)
            corrected = context.correct_event(event)
            if corrected is None:
                continue
            choices = corrected.get("choices") or ()
            finished += sum(choice.get("finish_reason") is not None for choice in choices)
            if finished >= context.call.choices:
                held.append(corrected)
            else:
                progress.committed = True
                await progress.reply.event(corrected)
    if not held:
        raise EngineAnswer("the engine's stream ended without a finish reason")
    return held


async def send_end(held: list[dict[str, Any]], context: AnswerContext, reply: Reply) -> None:
    """Send what was held back."""
    if not context.call.stream:
        (answer,) = held
        await reply.whole_json(200, answer)
        return
    for event in held:
        await reply.event(event)
    await reply.end_stream()


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
