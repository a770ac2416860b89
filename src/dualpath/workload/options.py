"""What a replay is told, what it reports on the way, and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from dualpath.workload.measure import Figures
from dualpath.workload.records import RequestRecord


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay.

    Attributes:
        url: the endpoint, with or without ``/v1``.
        model: name to ask for; the endpoint's first when empty.
        api_key: bearer token; none when empty.
        seed: of arrivals (agents carry their own).
        aps: agents arriving a second, Poisson; None starts all at once.
        latency_scale: factor on the agents' pauses; 0 leaves them out.
        timeout_s: deadline of each request, retries included.
        retries: tries after a 5xx or a broken connection while no token has come.
        slo_ttft_s, slo_tpot_s: limits of the verdict.
        out: folder for ``requests.jsonl``; nothing is written when None.
        keep_records: keep every record in the result (long runs: write them out instead).

    Raises:
        ValueError: a value makes no sense.
    """

    url: str
    model: str = ""
    api_key: str = ""
    seed: int = 0
    aps: float | None = None
    latency_scale: float = 1.0
    timeout_s: float = 600.0
    retries: int = 0
    slo_ttft_s: float = 4.0
    slo_tpot_s: float = 0.05
    out: Path | None = None
    keep_records: bool = True

    def __post_init__(self) -> None:
        if wrong := fault_of_url(self.url):
            raise ValueError(f"url {wrong}")
        if not self.api_key.isascii() or not self.api_key.isprintable():
            raise ValueError("api_key must be printable ASCII, as a header is")
        for name in ("aps", "timeout_s", "slo_ttft_s", "slo_tpot_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0, and finite, got {value}")
        for name in ("latency_scale", "retries"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name} must not be negative, and finite, got {getattr(self, name)}"
                )


def fault_of_url(url: str) -> str:
    """What is wrong with the address of an endpoint; empty when nothing is."""
    if not url.startswith(("http://", "https://")):
        return f"must start with http:// or https://, got {url!r}"
    try:
        parts = urlsplit(url)
        good = bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    return "" if good else f"must be such as http://host:8000, got {url!r}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands."""

    requests_done: int
    requests_total: int
    agents_done: int
    agents_total: int
    failed: int
    tokens_out: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A run's figures and, unless turned off, its records in order of their ends."""

    figures: Figures
    records: tuple[RequestRecord, ...]

    @property
    def ok(self) -> bool:
        """Whether every agent finished every round."""
        return self.figures.agents_done == self.figures.agents and not self.figures.interrupted
