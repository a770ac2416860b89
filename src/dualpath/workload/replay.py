"""Replays agents against an OpenAI-compatible endpoint and measures what they see.

Offline all agents start at once; online they arrive as a Poisson process. Each runs its rounds one
after the other: prompt, streamed answer, the tool's time, next prompt. Requests, prompts and
arrival times depend on the seed only, so two endpoints can be given the same work and their
answers compared (``workload.compare``).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dualpath.workload.agents import Agent, Ask
from dualpath.workload.client import Endpoint
from dualpath.workload.front import look, look_settled
from dualpath.workload.measure import Meter
from dualpath.workload.options import Progress, ReplayOptions, ReplayResult
from dualpath.workload.records import RecordWriter, RequestRecord
from dualpath.workload.stream import Answer, Failure, RequestFailed

_MODELS_S = 10.0


async def replay(
    agents: Sequence[Agent],
    options: ReplayOptions,
    *,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> ReplayResult:
    """Run all agents to their ends, or until ``stop`` is set.

    A request that fails ends its agent; the others go on, and the failure is counted. After
    ``stop`` the requests under way are dropped uncounted and the result says ``interrupted``.

    Args:
        agents: used up by the run.
        options: how.
        progress: called after every request, from this loop; must not raise.
        stop: ends the run early.

    Raises:
        ValueError: there are no agents.
        RequestFailed: the endpoint cannot be reached or has no model.
        RecordError: ``options.out`` cannot be used.
    """
    if not agents:
        raise ValueError("there are no agents to replay")
    async with Endpoint(options.url, options.api_key) as endpoint:
        with contextlib.ExitStack() as stack:
            model = options.model or await first_model(endpoint)
            writer = stack.enter_context(RecordWriter(options.out)) if options.out else None
            before = await look(endpoint)
            run = _Run(agents, options, endpoint, model, writer, progress)
            interrupted = await run.all(stop)
            ended_s = time.perf_counter()
            after = await look_settled(endpoint) if before else None
    return ReplayResult(
        run.meter.figures(
            agents=len(agents),
            not_sent=run.total - run.meter.requests,
            duration_s=ended_s - run.start_s,
            front=after.since(before) if after and before else None,
            aps=options.aps,
            seed=options.seed,
            interrupted=interrupted,
        ),
        tuple(run.records),
    )


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def first_model(endpoint: Endpoint) -> str:
    """Name of the first model that the endpoint offers.

    Raises:
        RequestFailed: it cannot be reached, or offers none.
    """
    status, body = await endpoint.get("/v1/models", _MODELS_S)
    if status == 200:
        with contextlib.suppress(msgspec.DecodeError):  # said below, with what was received
            models = msgspec.json.decode(body, type=_Models).data
            if models:
                return models[0].id
    shown = body[:200].decode(errors="replace")
    text = f"{endpoint.url}/v1/models names no model (HTTP {status}): {shown}"
    raise RequestFailed(Failure.REFUSED, text)


def arrivals_s(count: int, aps: float | None, seed: int) -> list[float]:
    """Arrival times of agents after the start: all 0, or Poisson at ``aps``."""
    if aps is None:
        return [0.0] * count
    rng = random.Random(f"arrivals:{seed}")
    times: list[float] = []
    now_s = 0.0
    for _ in range(count):
        now_s += rng.expovariate(aps)
        times.append(now_s)
    return times


class _Run:
    """One run under way."""

    def __init__(
        self,
        agents: Sequence[Agent],
        options: ReplayOptions,
        endpoint: Endpoint,
        model: str,
        writer: RecordWriter | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.meter = Meter(options.slo_ttft_s, options.slo_tpot_s)
        self.records: list[RequestRecord] = []
        self.total = sum(agent.requests for agent in agents)
        self.start_s = time.perf_counter()
        self._agents = agents
        self._options = options
        self._endpoint = endpoint
        self._common: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self._writer = writer
        self._progress = progress

    async def all(self, stop: asyncio.Event | None) -> bool:
        """Run every agent; True when stopped early."""
        options = self._options
        due = arrivals_s(len(self._agents), options.aps, options.seed)
        self.start_s = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._agent(number, agent, due[number]))
                    for number, agent in enumerate(self._agents)
                ]
                if stop is not None:
                    watcher = group.create_task(_cancel_on(stop, tasks))
                    await asyncio.wait(tasks)
                    watcher.cancel()
        except BaseExceptionGroup as group_error:
            # The first error cancelled all others; it is the one worth telling.
            raise group_error.exceptions[0] from None
        return stop is not None and stop.is_set() and any(task.cancelled() for task in tasks)

    async def _agent(self, number: int, agent: Agent, due_s: float) -> None:
        arrival_s = self.start_s + due_s
        await asyncio.sleep(arrival_s - time.perf_counter())
        end_s = arrival_s
        for index in range(agent.rounds):
            ask = agent.ask(index)
            if ask is not None:
                answered = await self._request(number, index, agent, ask)
                end_s = time.perf_counter()
                if not answered:
                    return
            if index + 1 < agent.rounds:
                await asyncio.sleep(agent.pause_s(index) * self._options.latency_scale)
        self.meter.agent_done(end_s - arrival_s)
        self._report()

    async def _request(self, number: int, index: int, agent: Agent, ask: Ask) -> bool:
        """Send, measure, record; False when there is no usable answer."""
        options = self._options
        sent_s = time.perf_counter() - self.start_s
        body = {**self._common, **ask.body, "max_tokens": ask.gen_tokens}
        answer: Answer | None = None
        failure: RequestFailed | None = None
        try:
            answer = await self._endpoint.ask(
                ask.path, body, timeout_s=options.timeout_s, retries=options.retries
            )
            _check_length(ask, answer)
            agent.take(index, answer)
        except RequestFailed as error:
            failure = error
        record = _record(number, index, agent.name, ask, sent_s, answer, failure)
        self.meter.request(record)
        if options.keep_records:
            self.records.append(record)
        if self._writer is not None:
            self._writer.write(record)
        self._report()
        return failure is None

    def _report(self) -> None:
        if self._progress is not None:
            meter = self.meter
            self._progress(
                Progress(
                    requests_done=meter.requests,
                    requests_total=self.total,
                    agents_done=len(meter.jct_s),
                    agents_total=len(self._agents),
                    failed=meter.failed,
                    tokens_out=meter.tokens_out,
                )
            )


async def _cancel_on(stop: asyncio.Event, tasks: Sequence[asyncio.Task[None]]) -> None:
    await stop.wait()
    for task in tasks:
        task.cancel()


def _check_length(ask: Ask, answer: Answer) -> None:
    got, wanted = answer.completion_tokens, ask.gen_tokens
    if got > wanted or (ask.exact and got != wanted):
        text = f"asked for {wanted} tokens, got {got} ({answer.finish_reason})"
        raise RequestFailed(Failure.LENGTH, text)


def _record(
    number: int,
    index: int,
    name: str,
    ask: Ask,
    sent_s: float,
    answer: Answer | None,
    failure: RequestFailed | None,
) -> RequestRecord:
    record = RequestRecord(
        agent=number,
        round=index,
        name=name,
        prompt_digest=ask.digest,
        asked_tokens=ask.gen_tokens,
        start_s=sent_s,
        prompt_tokens=ask.prompt_tokens,
        attempts=failure.attempts if failure else 1,
        failure=failure.failure.value if failure else "",
        error=str(failure) if failure else "",
    )
    if answer is None:
        return record
    return msgspec.structs.replace(
        record,
        prompt_tokens=ask.prompt_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        token_ids=answer.token_ids,
        text=answer.text,
        finish_reason=answer.finish_reason,
        ttft_s=answer.ttft_s,
        ttst_s=answer.ttst_s,
        tpot_s=answer.tpot_s,
        total_s=answer.total_s,
        attempts=answer.attempts,
        headers=answer.headers,
    )
