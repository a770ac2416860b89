"""Requests that one engine answers without loaded KV (see ``Call.alone``).

Their KV is neither read nor stored. They go to a DE, which is a complete engine; they need the
log-probabilities of the whole prompt, or run another prompt than the one in the request.
"""

from __future__ import annotations

from dualpath.config import Role
from dualpath.serve.answer import AnswerContext
from dualpath.serve.decode import receive, send_end
from dualpath.serve.turn import Services, Turn
from dualpath.serve.waiting import run_while


async def answer_alone(services: Services, turn: Turn, number: int) -> None:
    """Answer the client.

    Raises:
        AttemptFailed: another try may do better, unless the turn is committed.
        PassedThrough: the engine's refusal, for the client.
    """
    member = await services.members.wait_usable(Role.DECODE)
    turn.record.decode = member.name
    turn.record.first_token = "de"
    turn.reply.headers = turn.record.headers()
    context = AnswerContext(
        call=turn.call,
        answer_id=turn.answer_id,
        model=services.config.model.name,
        prompt_ids=[],
        cached_tokens=0,
        first=None,
        own_usage=True,
    )
    url = member.hello.http_url + turn.call.endpoint.value
    whole = await run_while(
        receive(
            services.upstream, url, dict(turn.call.body), f"{turn.rid}-{number}", context, turn
        ),
        member,
        committed=lambda: turn.committed,
    )
    turn.committed = True
    await send_end(whole, turn.reply)
