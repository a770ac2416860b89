"""Figures of a run from its requests."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dualpath.workload.front import FrontTotals
from dualpath.workload.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and 99th percentile, in seconds."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None for no values."""
        if not values:
            return None
        ordered = sorted(values)
        return cls(math.fsum(ordered) / len(ordered), rank(ordered, 0.5), rank(ordered, 0.99))


def rank(ordered: Sequence[float], share: float) -> float:
    """Nearest-rank percentile: the smallest value with at least ``share`` of all at or below it."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Slo:
    """Verdict on a run: can this arrival rate be served?

    Met when nothing failed and the mean TTFT and mean TPOT keep their limits.

    Attributes:
        ttft_limit_s, tpot_limit_s: the limits.
        met: the verdict.
        attained: share of all requests that finished and kept both limits by themselves.
    """

    ttft_limit_s: float
    tpot_limit_s: float
    met: bool
    attained: float


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in numbers; the keys of the JSON line.

    Attributes:
        mode: of the DualPath front; None for any other server.
        agents, agents_done: how many started, and how many finished all their rounds.
        requests, failed, not_sent: requests that ended, those without an answer, and those never
            sent because their agent failed earlier or the run was stopped.
        retries: tries beyond each request's first.
        failures: failed requests by kind; first_error: the first one's text, None without any.
        tokens_in, tokens_out: prompt and answer tokens of answered requests.
        cached_tokens: prompt tokens the server says it did not compute; None when it never says.
        jct_s: mean over finished agents, arrival to last token, tool time included.
        jct: the same with percentiles.
        ttft_s, ttst_s, tpot_s: see ``stream.Answer``; the latter two are means.
        duration_s: first arrival to last end.
        snic: storage bytes read per node; path: hit bytes per read path; None when unknown.
        aps: agents arriving a second; None when all started at once.
        slo: verdict.
        seed: of prompts and arrivals.
        interrupted: whether the run was stopped before its end.
    """

    mode: str | None
    agents: int
    agents_done: int
    requests: int
    failed: int
    not_sent: int
    retries: int
    failures: dict[str, int]
    first_error: str | None
    tokens_in: int
    tokens_out: int
    cached_tokens: int | None
    jct_s: float | None
    jct: Spread | None
    ttft_s: Spread | None
    ttst_s: float | None
    tpot_s: float | None
    duration_s: float
    snic: dict[str, int] | None
    path: dict[str, int] | None
    aps: float | None
    slo: Slo
    seed: int
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """As plain objects."""
        return asdict(self)


@dataclass(slots=True)
class Meter:
    """Adds requests up as they end; memory is a few numbers a request. One owner."""

    ttft_limit_s: float
    tpot_limit_s: float
    requests: int = 0
    attained: int = 0
    retries: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int | None = None
    failures: Counter[str] = field(default_factory=Counter)
    first_error: str | None = None
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    ttst_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    jct_s: array[float] = field(default_factory=lambda: array("d"))

    def request(self, record: RequestRecord) -> None:
        """A request ended."""
        self.requests += 1
        self.retries += record.attempts - 1
        if record.failure:
            self.failures[record.failure] += 1
            if self.first_error is None:
                self.first_error = f"agent {record.agent} round {record.round}: {record.error}"
            return
        self.tokens_in += record.prompt_tokens or 0
        self.tokens_out += record.completion_tokens
        if record.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + record.cached_tokens
        for values, value in (
            (self.ttft_s, record.ttft_s),
            (self.ttst_s, record.ttst_s),
            (self.tpot_s, record.tpot_s),
        ):
            if value is not None:
                values.append(value)
        quick = (record.ttft_s or 0.0) <= self.ttft_limit_s
        self.attained += quick and (record.tpot_s or 0.0) <= self.tpot_limit_s

    def agent_done(self, jct_s: float) -> None:
        """An agent finished all its rounds."""
        self.jct_s.append(jct_s)

    @property
    def failed(self) -> int:
        """Requests without an answer so far."""
        return self.failures.total()

    def figures(
        self,
        *,
        agents: int,
        not_sent: int,
        duration_s: float,
        front: FrontTotals | None,
        aps: float | None,
        seed: int,
        interrupted: bool,
    ) -> Figures:
        """Everything so far."""
        jct, ttft = Spread.of(self.jct_s), Spread.of(self.ttft_s)
        tpot_s = _mean(self.tpot_s)
        met = (
            not self.failures
            and not interrupted
            and ttft is not None
            and ttft.mean <= self.ttft_limit_s
            and (tpot_s or 0.0) <= self.tpot_limit_s
        )
        share = self.attained / self.requests if self.requests else 0.0
        return Figures(
            mode=front.mode if front else None,
            agents=agents,
            agents_done=len(self.jct_s),
            requests=self.requests,
            failed=self.failed,
            not_sent=not_sent,
            retries=self.retries,
            failures=dict(self.failures),
            first_error=self.first_error,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            cached_tokens=self.cached_tokens,
            jct_s=jct.mean if jct else None,
            jct=jct,
            ttft_s=ttft,
            ttst_s=_mean(self.ttst_s),
            tpot_s=tpot_s,
            duration_s=duration_s,
            snic=front.snic if front else None,
            path=front.path if front else None,
            aps=aps,
            slo=Slo(self.ttft_limit_s, self.tpot_limit_s, met, share),
            seed=seed,
            interrupted=interrupted,
        )


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
