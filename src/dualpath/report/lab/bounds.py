"""What runs should reach, and what they did reach while storage was busy. Pure arithmetic.

The bound: where all hits are read from storage and every storage NIC has work, P + D NICs read
(P + D) / P times as fast as the P of the prefill nodes alone. So runs are judged on the time in
which every node that may read has reads waiting; at a run's start and end, and wherever agents
wait for each other, there is less to share out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec

from dualpath.sim.result import Windows

SNIC_WINDOW_S: Final = 1.0
BALANCE_REQUESTS: Final = 5
_GIGA: Final = 1e9
_PETA: Final = 1e15


class NodeSample(msgspec.Struct, frozen=True, kw_only=True):
    """A node at one moment. Bytes are the kernel's totals; ``queue_tokens`` wait for, or are being
    read by, its storage reads."""

    snic_rx_bytes: int
    snic_tx_bytes: int
    cnic_rx_bytes: int
    cnic_tx_bytes: int
    queue_tokens: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """All nodes at one moment, seconds after the run's start."""

    t_s: float
    nodes: dict[str, NodeSample]


class Busy(msgspec.Struct, frozen=True, kw_only=True):
    """The time in which every reading node had reads waiting.

    Attributes:
        seconds: its length.
        share: of the whole run.
        read_bytes: received by the storage NICs of the reading nodes in it, by node.
    """

    seconds: float
    share: float
    read_bytes: dict[str, int]

    @property
    def rate_bytes_per_s(self) -> float | None:
        """All nodes together; None when there was no such time."""
        return sum(self.read_bytes.values()) / self.seconds if self.seconds else None


def pooled_bound(prefill: int, decode: int) -> float:
    """Most that the second path can gain over ``prefill`` NICs alone: (P + D) / P."""
    return (prefill + decode) / prefill


def busy(samples: Sequence[Sample], readers: Sequence[str]) -> Busy:
    """The intervals between samples at whose both ends all of ``readers`` had reads waiting.

    Raises:
        ValueError: there are no readers.
    """
    if not readers:
        raise ValueError("no node reads")
    seconds = 0.0
    read = dict.fromkeys(readers, 0)
    for one, other in pairwise(samples):
        if all(at.nodes[name].queue_tokens for at in (one, other) for name in readers):
            seconds += other.t_s - one.t_s
            for name in readers:
                read[name] += other.nodes[name].snic_rx_bytes - one.nodes[name].snic_rx_bytes
    whole_s = samples[-1].t_s - samples[0].t_s if samples else 0.0
    return Busy(seconds=seconds, share=seconds / whole_s if whole_s else 0.0, read_bytes=read)


def rates(samples: Sequence[Sample], counter: str, window_s: float) -> Windows:
    """A counter's bytes per node and window of time; between samples it is taken to grow evenly."""
    series: dict[str, list[float]] = {}
    if len(samples) < 2:
        return Windows(window_s, series)
    count = max(1, int((samples[-1].t_s - samples[0].t_s) / window_s))
    edges = [samples[0].t_s + window_s * at for at in range(count + 1)]
    for name in samples[0].nodes:
        totals = [(at.t_s, getattr(at.nodes[name], counter)) for at in samples]
        at_edges = _interpolated(totals, edges)
        series[name] = [after - before for before, after in pairwise(at_edges)]
    return Windows(window_s, series)


def _interpolated(points: Sequence[tuple[float, float]], at: Sequence[float]) -> list[float]:
    values: list[float] = []
    index = 0
    for moment in at:
        while index + 2 < len(points) and points[index + 1][0] < moment:
            index += 1
        (left_s, low), (right_s, high) = points[index], points[index + 1]
        part = (moment - left_s) / (right_s - left_s) if right_s > left_s else 1.0
        values.append(low + (high - low) * min(1.0, max(0.0, part)))
    return values


def max_over_mean(
    samples: Sequence[Sample], until_s: float, snic_bytes_per_s: float, request_bytes: float
) -> float | None:
    """Mean over windows of the busiest storage NIC's bytes over the mean one's, up to ``until_s``,
    when the first agent was over; None without a window.

    In a window one NIC can read the hits of ``BALANCE_REQUESTS`` requests, ``request_bytes`` each:
    shorter ones would show which request a NIC happens to be at, not how requests are shared out.
    (The paper's NICs read dozens of requests a second.)
    """
    window_s = max(SNIC_WINDOW_S, BALANCE_REQUESTS * request_bytes / snic_bytes_per_s)
    ratios = rates(samples, "snic_rx_bytes", window_s).max_over_mean(until_s)
    return statistics.fmean(ratios) if ratios else None


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """How storage and computation stand to each other.

    Attributes:
        nic_ratio: a node's compute NICs over its storage NIC, in bandwidth.
        gb_per_pflop: stored bytes read per FLOP of prompt computed: the workload's and model's own,
            as in Table 1 of the paper.
        storage_over_compute: seconds in which one storage NIC reads a request's hits, over seconds
            in which one node computes its misses: above 1, storage is the limit.
    """

    nic_ratio: float
    gb_per_pflop: float
    storage_over_compute: float


def balance(
    *,
    cnic_bytes_per_s: float,
    snic_bytes_per_s: float,
    hit_bytes: float,
    miss_flops: float,
    node_flops_per_s: float,
) -> Balance:
    """See ``Balance``; ``cnic_bytes_per_s`` is of all the node's compute NICs.

    Raises:
        ValueError: a figure is not above 0.
    """
    for name, value in (
        ("cnic_bytes_per_s", cnic_bytes_per_s), ("snic_bytes_per_s", snic_bytes_per_s),
        ("hit_bytes", hit_bytes), ("miss_flops", miss_flops),
        ("node_flops_per_s", node_flops_per_s),
    ):  # fmt: skip
        if not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}")
    return Balance(
        nic_ratio=cnic_bytes_per_s / snic_bytes_per_s,
        gb_per_pflop=hit_bytes / miss_flops * _PETA / _GIGA,
        storage_over_compute=(hit_bytes / snic_bytes_per_s) / (miss_flops / node_flops_per_s),
    )
