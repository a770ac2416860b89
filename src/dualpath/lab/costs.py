"""What the engines of a lab need, measured in oracle mode, for the simulator. Pure but for files.

Oracle moves no byte, so that its times are those of engines, front and client alone:

    one agent            a step with one request; decoding's start; the end of a turn
    with longer appends  both together: time to the first token by the number of miss tokens
    all agents of a run  what every further request adds to a step

Oracle stores nothing, so that what a turn adds is computed again in the next: miss tokens are those
that the front counts.

They share the machine's cores with everything else of the lab, as they do when it is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import msgspec

from dualpath.lab.experiments import Shape
from dualpath.sim import MeasuredCosts
from dualpath.sim.load import STORED_KEY
from dualpath.workload import RequestRecord, Round, Trajectory

LONGER: Final = 8
"""Times the appends of the second probe are longer."""
_LEAST_S: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Probes:
    """The shapes to replay in oracle mode."""

    one: Shape
    longer: Shape
    all: Shape

    @classmethod
    def of(cls, shape: Shape) -> Probes:
        """For runs like ``shape``."""
        one = replace(shape, agents=1)
        return cls(one, replace(one, append_tokens=LONGER * shape.append_tokens, turns=2), shape)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one engine, without any transfer.

    Attributes:
        prefill_tokens_per_s: miss tokens computed.
        decode_step_s: of one request; decode_step_per_request_s: what each adds to it.
        decode_start_s: from the first token to the second, less one step.
        request_overhead_s: everything else of a request.
        context_tokens: stored before the tokens that were computed.
    """

    prefill_tokens_per_s: float
    decode_step_s: float
    decode_step_per_request_s: float
    decode_start_s: float
    request_overhead_s: float
    context_tokens: int

    def measured(
        self, snic_bytes_per_s: Mapping[str, float], cnic_bytes_per_s: float
    ) -> MeasuredCosts:
        """Together with the NICs' rates, payload only, for the simulator."""
        return MeasuredCosts(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_step_s=self.decode_step_s,
            decode_step_per_request_s=self.decode_step_per_request_s,
            decode_start_s=self.decode_start_s,
            request_overhead_s=self.request_overhead_s,
            context_tokens=self.context_tokens,
            snic_bytes_per_s=snic_bytes_per_s,
            cnic_bytes_per_s=cnic_bytes_per_s,
        )


def costs_from(
    probes: Probes,
    one: Sequence[RequestRecord],
    longer: Sequence[RequestRecord],
    everybody: Sequence[RequestRecord],
    decode_nodes: int,
) -> Costs:
    """From the requests of the three probes.

    Raises:
        ValueError: a probe has no answered request of three tokens or more.
    """
    fixed_s, per_token_s = _line(
        [
            (record.prompt_tokens - (record.cached_tokens or 0), record.ttft_s)
            for record in (*one, *longer)
            if record.prompt_tokens is not None and record.ttft_s is not None
        ]
    )
    step_s = _median(one, _tpot)
    batch = max(1.0, probes.all.agents / decode_nodes)
    added_s = max(0.0, _median(everybody, _tpot) - step_s) / max(1.0, batch - 1)
    return Costs(
        prefill_tokens_per_s=1 / per_token_s,
        decode_step_s=max(step_s - added_s, _LEAST_S),
        decode_step_per_request_s=added_s,
        decode_start_s=max(0.0, _median(one, _ttst) - step_s),
        request_overhead_s=fixed_s + max(0.0, _median(one, _after_last)),
        context_tokens=probes.one.context_tokens,
    )


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of a request without a miss token, and of each miss token: the median of all pairs'
    slopes (Theil and Sen), because one request that the machine kept waiting must not decide."""
    slopes = [
        (high_s - low_s) / (more - fewer)
        for (fewer, low_s), (more, high_s) in combinations(sorted(points), 2)
        if more > fewer
    ]
    if not slopes:
        raise ValueError("the probes have no requests of different numbers of miss tokens")
    slope = max(_LEAST_S, statistics.median(slopes))
    fixed_s = statistics.median(seconds - slope * tokens for tokens, seconds in points)
    return max(0.0, fixed_s), slope


def simulated(shape: Shape) -> list[Trajectory]:
    """The measured rounds of a shape for the simulator, which knows what is stored beforehand."""
    told, first, *rest = shape.measured()[0].rounds
    whole = Round(told.append_tokens + first.append_tokens, first.gen_tokens, first.tool_latency_s)
    return [
        Trajectory(f"agent-{number}", (whole, *rest), {STORED_KEY: told.append_tokens})
        for number in range(shape.agents)
    ]


def _median(
    records: Iterable[RequestRecord], value: Callable[[RequestRecord], float | None]
) -> float:
    values = [found for record in records if (found := value(record)) is not None]
    if not values:
        raise ValueError("a probe has no answered request of three tokens or more")
    return statistics.median(values)


def _ttst(record: RequestRecord) -> float | None:
    return record.ttst_s


def _tpot(record: RequestRecord) -> float | None:
    return record.tpot_s


def _after_last(record: RequestRecord) -> float | None:
    """From the last token to the end of the answer: the turn's blocks become durable."""
    if None in (record.total_s, record.ttft_s, record.ttst_s, record.tpot_s):
        return None
    assert record.total_s is not None and record.ttft_s is not None
    assert record.ttst_s is not None and record.tpot_s is not None
    told_s = record.ttft_s + record.ttst_s + record.tpot_s * (record.completion_tokens - 2)
    return record.total_s - told_s
