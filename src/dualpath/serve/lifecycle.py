"""A client's request from arrival to its last byte, over as many tries as it takes."""

from __future__ import annotations

import asyncio
import logging

from dualpath.config import Role
from dualpath.control.messages import Fingerprint
from dualpath.serve.alone import answer_alone
from dualpath.serve.attempt import Attempt
from dualpath.serve.errors import (
    ApiError,
    AttemptFailed,
    EngineAnswer,
    EngineLost,
    PassedThrough,
    bad_request,
)
from dualpath.serve.record import Outcome, Phase
from dualpath.serve.tokenise import given_ids, prompt_ids
from dualpath.serve.turn import Services, Turn
from dualpath.serve.waiting import run_while

logger = logging.getLogger(__name__)
_BACKOFF_S = 0.1


async def answer(services: Services, turn: Turn) -> None:
    """Answer the client, with an error where there is no other way.

    Every request ends by its deadline. Cancelling (the client has gone) ends it at once; what it
    holds on engines is then released in the background.
    """
    record = turn.record
    try:
        async with asyncio.timeout_at(turn.deadline):
            await _tries(services, turn)
        record.outcome = Outcome.OK.value
    except TimeoutError:
        record.outcome = Outcome.DEADLINE.value
        record.error = "deadline"
        await turn.reply.fail(504, "The request was not finished within its time limit.")
    except ApiError as error:
        record.outcome = (Outcome.REFUSED if error.status < 500 else Outcome.FAILED).value
        record.error = error.message
        await turn.reply.fail_with(error.status, error.body(), error.headers)
    except PassedThrough as error:
        record.outcome = Outcome.REFUSED.value
        record.error = f"engine: HTTP {error.status}"
        await turn.reply.fail_with(error.status, error.body)
    except AttemptFailed as error:
        record.outcome = Outcome.FAILED.value
        record.error = str(error)
        await turn.reply.fail(
            503, f"The request failed on its engines: {error}", headers={"retry-after": "1"}
        )
    except asyncio.CancelledError:
        record.outcome = (Outcome.OK if turn.complete else Outcome.CANCELLED).value
        raise
    except Exception as error:  # a fault in the front must end this request only, and be seen
        logger.exception("request %s met a fault in the front", turn.rid, extra={"rid": turn.rid})
        services.metrics.errors.inc()
        record.outcome = Outcome.FAILED.value
        record.error = f"{type(error).__name__}: {error}"
        await turn.reply.fail(500, "The server met an internal error.")
    finally:
        record.status = turn.reply.status
        record.measured(turn.tempo)
        if turn.reply.first_byte_s is not None:
            record.first_byte_s = turn.reply.first_byte_s - record.arrived_s


async def _tries(services: Services, turn: Turn) -> None:
    alone = turn.call.alone or (turn.call.is_chat and services.habits.own_chat_prompt)
    number = 0
    while True:
        turn.record.attempt = number
        try:
            if alone:
                await answer_alone(services, turn, number)
                return
            fingerprint = await _prepare(services, turn)
            await Attempt(services, turn, number).run(fingerprint)
            return
        except AttemptFailed as error:
            if turn.committed or number >= services.config.front.max_retries:
                raise
            services.metrics.retries.labels(_kind(error)).inc()
            logger.warning(
                "request %s, try %d failed: %s", turn.rid, number, error, extra={"rid": turn.rid}
            )
        # An engine that is dying may still look usable for a moment.
        await asyncio.sleep(_BACKOFF_S * 2**number)
        number += 1


async def _prepare(services: Services, turn: Turn) -> Fingerprint:
    """Token ids, once; and what the engines agree on."""
    try:
        async with asyncio.timeout(services.config.timeouts.admission):
            member = await services.members.wait_usable(Role.DECODE)
    except TimeoutError:
        raise ApiError(503, "no decode engine is there", headers={"retry-after": "5"}) from None
    if not turn.prompt_ids:
        with turn.record.timed(Phase.TOKENISE):
            ids = given_ids(turn.call)
            if ids is None:
                work = prompt_ids(
                    turn.call,
                    services.upstream,
                    member.hello.http_url,
                    services.config.model.name,
                    turn.rid,
                    services.config.engine.extra_args,
                )
                ids = await run_while(work, member)
        _check_length(len(ids), turn.call.max_tokens, services.config.model.max_model_len)
        turn.prompt_ids = ids
        turn.record.prompt_tokens = len(ids)
    return member.hello.fingerprint


def _check_length(prompt: int, new: int | None, most: int) -> None:
    """What the engines would refuse, refused before any of them is bothered."""
    if prompt >= most:
        raise bad_request(
            f"This model's maximum context length is {most} tokens. However, your prompt has "
            f"{prompt} tokens, which leaves no room for an answer."
        )
    if new is not None and prompt + new > most:
        raise bad_request(
            f"This model's maximum context length is {most} tokens. However, you requested {new} "
            f"output tokens and your prompt has {prompt} tokens."
        )


def _kind(error: AttemptFailed) -> str:
    if isinstance(error, EngineLost):
        return "engine_lost"
    return "engine_error" if isinstance(error, EngineAnswer) else "session_failed"
