"""One try of a request: engines, reads, prefill, decode. docs/dataflow.md has the picture."""

from __future__ import annotations

import asyncio
from typing import Any

from dualpath.config import Role
from dualpath.control.messages import (
    Allocated,
    Fingerprint,
    GoDecode,
    OpenDecode,
    Opened,
    OpenPrefill,
    SessionSpec,
)
from dualpath.scheduler import Assignment, ReadPath, Request
from dualpath.serve.answer import AnswerContext
from dualpath.serve.decode import receive, send_complete, send_end
from dualpath.serve.errors import ApiError, AttemptFailed, EngineLost, PassedThrough
from dualpath.serve.first_token import (
    FirstToken,
    continued_body,
    pe_may_sample,
    read_first_token,
    sampling_of,
)
from dualpath.serve.members import Member
from dualpath.serve.record import Phase
from dualpath.serve.sessions import EngineSession
from dualpath.serve.spec import layout_of, session_spec
from dualpath.serve.turn import Services, Turn
from dualpath.serve.waiting import answer_of, any_of, run_while

_UNSTATED_NEW_TOKENS = 1024
"""HBM promised for an answer whose length the client did not limit."""


class Attempt:
    """Runs once; whatever happens, nothing it began is left behind (sessions close in the
    background)."""

    def __init__(self, services: Services, turn: Turn, number: int) -> None:
        self._services = services
        self._turn = turn
        self._number = number
        self._sid = f"{turn.rid}#{number}"
        self._prefill: EngineSession | None = None
        self._prefill_closing: asyncio.Task[None] | None = None
        self._decode: EngineSession | None = None
        self._epoch: int | None = None

    async def run(self, fingerprint: Fingerprint) -> None:
        """Answer the client.

        Raises:
            AttemptFailed: another try may do better, unless the turn is committed.
            PassedThrough: the engine's refusal, for the client.
            ApiError: no try can succeed.
        """
        services = self._services
        done = False
        try:
            self._epoch = services.epoch.number if services.epoch.settled else None
            spec = session_spec(services, self._turn, self._number, fingerprint)
            assignment = await self._assigned(spec)
            self._check_epoch()
            await self._serve(spec, assignment, fingerprint)
            done = True
        finally:
            if done or self._turn.complete:
                services.dispatcher.finish(self._sid)
            else:
                services.dispatcher.cancel(self._sid)
            self._close(done)

    # ---- engines -----------------------------------------------------------------------------

    async def _assigned(self, spec: SessionSpec) -> Assignment:
        services, turn = self._services, self._turn
        block_tokens = services.config.engine.block_tokens
        room = services.config.model.max_model_len - spec.prompt_tokens
        limit = turn.call.max_tokens
        request = Request(
            rid=self._sid,
            prompt_tokens=spec.prompt_tokens,
            hit_tokens=spec.hit_blocks * block_tokens,
            max_new_tokens=max(0, min(room, _UNSTATED_NEW_TOKENS if limit is None else limit)),
            block_tokens=block_tokens,
        )
        with turn.record.timed(Phase.SCHEDULE):
            try:
                async with asyncio.timeout(services.config.timeouts.admission):
                    return await services.dispatcher.assign(request)
            except TimeoutError:
                raise ApiError(
                    503,
                    "no engine became free in time",
                    headers={"retry-after": "1"},
                ) from None

    def _check_epoch(self) -> None:
        """A hit found before a weight update must not be used after it."""
        epoch = self._services.epoch
        if self._epoch != (epoch.number if epoch.settled else None):
            raise AttemptFailed("the weights changed while the request waited")

    def _member(self, name: str) -> Member:
        member = self._services.members.get(name)
        if member is None:
            raise EngineLost(f"engine {name} was lost")
        return member

    # ---- the data flow -----------------------------------------------------------------------

    async def _serve(
        self, spec: SessionSpec, assignment: Assignment, fingerprint: Fingerprint
    ) -> None:
        services, turn = self._services, self._turn
        prefill, decode = self._member(assignment.prefill), self._member(assignment.decode)
        split = assignment.read.prefill_tokens // fingerprint.block_tokens
        record = turn.record
        record.prefill, record.decode = prefill.name, decode.name
        good = await self._read(spec, prefill, decode, split)
        self._check_epoch()
        record.hit_tokens = good * fingerprint.block_tokens
        record.path = assignment.read.path.value if good else "none"
        self._count(spec, assignment, fingerprint, good)
        with record.timed(Phase.PREFILL):
            await self._run_prefill(prefill, decode, record.hit_tokens)
        with record.timed(Phase.HANDOVER):
            await self._handed_over(prefill, decode)
        services.dispatcher.prefill_done(self._sid)
        assert self._prefill is not None and self._decode is not None
        # The PE has nothing left to do, so what it holds need not wait for the answer's end.
        self._prefill_closing = services.closer.close_one(self._prefill, "prefill done")
        first = turn.first
        ended = first is not None and first.finish_reason is not None
        decode.send(
            GoDecode(rid=turn.rid, attempt=self._number, good_blocks=good, decode=not ended)
        )
        record.first_token = "de" if first is None else "pe"
        await self._answer(decode, first, ended)

    async def _read(self, spec: SessionSpec, prefill: Member, decode: Member, split: int) -> int:
        """Open both sides; the number of leading blocks that were read and verified."""
        services, turn = self._services, self._turn
        # The DE gives up by itself at this limit; the second more lets its answer come first.
        admission_s = services.config.timeouts.admission + 1.0
        with turn.record.timed(Phase.ALLOCATE):
            self._decode = decode.open_session(turn.rid, self._number)
            self._decode.opened.add_done_callback(
                lambda _: services.dispatcher.read_done(self._sid, Role.DECODE)
            )
            decode.send(
                OpenDecode(
                    spec=spec,
                    read=(split, spec.hit_blocks),
                    prefill_engine=prefill.name,
                    sequences=turn.call.choices,
                )
            )
            try:
                async with asyncio.timeout(admission_s):
                    allocated = await self._allocated(self._decode)
            except TimeoutError:
                raise AttemptFailed(f"{decode.name} did not answer about buffer room") from None
        with turn.record.timed(Phase.READ):
            self._prefill = prefill.open_session(turn.rid, self._number)
            self._prefill.opened.add_done_callback(
                lambda _: services.dispatcher.read_done(self._sid, Role.PREFILL)
            )
            prefill.send(
                OpenPrefill(
                    spec=spec,
                    read=(0, split),
                    decode_engine=decode.name,
                    decode_incarnation=decode.peer.incarnation,
                    slots=allocated.slots,
                )
            )
            by_decode = _checked(await answer_of(self._decode.opened, decode, prefill), decode)
            by_prefill = _checked(await answer_of(self._prefill.opened, prefill, decode), prefill)
        services.metrics.opened("de", by_decode)
        services.metrics.opened("pe", by_prefill)
        turn.record.pe_blocks = min(by_prefill.good_blocks, split)
        turn.record.de_blocks = min(by_decode.good_blocks, spec.hit_blocks - split)
        if turn.record.pe_blocks < split:
            return turn.record.pe_blocks  # a gap: what lies behind it cannot be used
        return split + turn.record.de_blocks

    async def _allocated(self, session: EngineSession) -> Allocated:
        await any_of(session.allocated, session.opened, session.member.gone)
        if not session.allocated.done() and session.opened.done():
            _checked(session.opened.result(), session.member)
            raise AttemptFailed(f"{session.member.name} opened a session without room for it")
        return await answer_of(session.allocated, session.member)

    async def _run_prefill(self, prefill: Member, decode: Member, hit_tokens: int) -> None:
        """P2-P4 / D2-D4, and token 1 to the client where the PE may sample it."""
        services, turn = self._services, self._turn
        samples = turn.first is None and pe_may_sample(turn.call, services.habits)
        body: dict[str, Any] = {
            "model": services.config.model.name,
            "prompt": turn.prompt_ids,
            "max_tokens": 1,
            "return_token_ids": True,
            **(sampling_of(turn.call) if samples else {"temperature": 0}),
            "kv_transfer_params": {
                "dualpath": {
                    "rid": turn.rid,
                    "attempt": self._number,
                    "hit_tokens": hit_tokens,
                    "quota": turn.plan.quota,
                }
            },
        }
        url = f"{prefill.hello.http_url}/v1/completions"
        work = services.upstream.post(url, body, f"{turn.rid}-{self._number}")
        status, answer = await run_while(work, prefill, decode)
        if status != 200:
            raise PassedThrough(status, answer)
        if samples:
            room = services.config.model.max_model_len - len(turn.prompt_ids)
            limit = room if turn.call.max_tokens is None else min(room, turn.call.max_tokens)
            turn.first = read_first_token(answer, limit)
            if turn.first is not None:
                turn.record.first_token = "pe"
                turn.tempo.token()
                await self._send_first()

    async def _handed_over(self, prefill: Member, decode: Member) -> None:
        """Wait until every Layer Block of the prompt is in the DE buffer."""
        assert self._prefill is not None
        done = await answer_of(self._prefill.prefill_done, prefill, decode)
        if done.error:
            raise AttemptFailed(f"prefill on {prefill.name} failed: {done.error}")

    async def _send_first(self) -> None:
        turn = self._turn
        turn.reply.headers = turn.record.headers()
        if turn.call.stream:
            await turn.reply.events(self._context().opening_events())

    async def _answer(self, decode: Member, first: FirstToken | None, ended: bool) -> None:
        turn = self._turn
        turn.reply.headers = turn.record.headers()
        context = self._context()
        if not ended:
            whole = await run_while(
                self._ask(decode, first, context), decode, committed=lambda: turn.committed
            )
        else:
            turn.tempo.tokens = 1
            whole = None if turn.call.stream else context.whole_from_first()
            if whole is None:
                await send_complete(context.ending_events(), turn)
        await self._durable(decode)
        turn.committed = True
        await send_end(whole, turn.reply)

    async def _ask(
        self, decode: Member, first: FirstToken | None, context: AnswerContext
    ) -> dict[str, Any] | None:
        services, turn = self._services, self._turn
        body = dict(turn.call.body) if first is None else continued_body(turn.call)
        ids = turn.prompt_ids if first is None else [*turn.prompt_ids, first.token_id]
        parameters: dict[str, Any] = {
            "dualpath": {
                "rid": turn.rid,
                "attempt": self._number,
                "loaded_tokens": len(turn.prompt_ids),
            }
        }
        if turn.call.is_chat:
            parameters["prompt_token_ids"] = ids
        elif not body.get("echo"):  # an echoed prompt is wanted as the text it came as
            body["prompt"] = ids
        body["kv_transfer_params"] = parameters
        url = decode.hello.http_url + turn.call.endpoint.value
        return await receive(
            services.upstream, url, body, f"{turn.rid}-{self._number}", context, turn
        )

    async def _durable(self, decode: Member) -> None:
        """The end of a turn waits for its blocks, so that the next turn hits them. A part of the
        request's time is left for sending that end."""
        services = self._services
        assert self._decode is not None
        try:
            async with asyncio.timeout(
                min(services.config.timeouts.durable, 0.9 * self._turn.left_s)
            ):
                durable = await answer_of(self._decode.durable, decode)
        except (TimeoutError, EngineLost):
            # The answer itself is complete and right.
            services.metrics.durable_timeouts.inc()
            return
        services.metrics.skipped_blocks.inc(durable.skipped)

    def _context(self) -> AnswerContext:
        turn = self._turn
        return AnswerContext(
            call=turn.call,
            answer_id=turn.answer_id,
            model=self._services.config.model.name,
            prompt_ids=turn.prompt_ids,
            cached_tokens=turn.record.hit_tokens,
            first=turn.first,
        )

    # ---- bookkeeping -------------------------------------------------------------------------

    def _count(
        self,
        spec: SessionSpec,
        assignment: Assignment,
        fingerprint: Fingerprint,
        good: int,
    ) -> None:
        metrics, record = self._services.metrics, self._turn.record
        size = layout_of(fingerprint).full_block_bytes
        for side, blocks in (("pe", record.pe_blocks), ("de", record.de_blocks)):
            metrics.hit(side, blocks, size)
        if assignment.read.path is ReadPath.SPLIT:
            metrics.split_bytes.inc((record.pe_blocks + record.de_blocks) * size)
        metrics.bad_blocks.inc(spec.hit_blocks - good)

    def _close(self, done: bool) -> None:
        closer = self._services.closer
        # A client that left with all its tokens has not given up: what they left is stored.
        complete = self._turn.complete and not done
        reason = "done" if done else "left complete" if complete else "given up"
        closing = self._prefill_closing
        if closing is None and self._prefill is not None:
            closing = closer.close_one(self._prefill, reason)
        if self._decode is not None:
            stored_s = self._services.config.timeouts.durable if complete else 0.0
            closer.close_pair(closing, self._decode, reason, stored_s)


def _checked(opened: Opened, member: Member) -> Opened:
    if not opened.error:
        return opened
    if opened.permanent:
        raise ApiError(400, f"the request does not fit {member.name}: {opened.error}")
    raise AttemptFailed(f"{member.name} could not open the session: {opened.error}")
