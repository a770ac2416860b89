"""Metrics of the engines, made from their latest reports at the moment of a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualpath.serve.members import Member

_ENGINE: Final = ("engine", "node")


class ClusterView(Protocol):
    """What a scrape looks at. Called in the event loop; must not wait or raise."""

    def engines(self) -> list[Member]:
        """Connected engines."""

    def figures(self) -> dict[str, float]:
        """Gauges and totals of the front, by a name of ``FIGURES`` or ``FRONT_TOTALS``."""

    def expected(self) -> dict[str, int]:
        """Engines of the cluster description, by role."""

    def node_figures(self) -> dict[str, dict[str, float]]:
        """Gauges by a name of ``NODE_FIGURES``, then by node."""


FIGURES: Final = {
    "ready": "Whether requests can be served now",
    "index_blocks": "Stored blocks that the front knows of",
    "weight_epoch": "Present weight epoch",
    "weight_epoch_settled": "Zero while an epoch is wanted that is not durable: nothing is hit",
    "scheduler_waiting_requests": "Requests that have no engines yet",
    "sessions_closing": "Sessions that are being closed",
    "snic_read_difference_ratio": "Read rates of the nodes, (most - least) / most",
    "attention_max_over_mean_ratio": "Attention time of the prefill engines, largest over mean",
}
FRONT_TOTALS: Final = {
    "decision_log_lines_lost": "Lines of the decision log that could not be written",
}
NODE_FIGURES: Final = {
    "snic_read_bytes_per_second": "Storage bytes read, mean of the last minute",
    "snic_read_limit_bytes_per_second": "Configured read limit; no sample without one",
}


@dataclass(frozen=True, slots=True)
class _Total:
    """A metric made of engine counters: its own label's value by counter name."""

    name: str
    text: str
    label: str = ""
    counters: tuple[tuple[str, str], ...] = ()
    prefix: str = ""


# Written out rather than passed through: names of metrics are read by people's dashboards, those
# of counters may change with the engine's code.
TOTALS: Final = (
    _Total("snic_read_bytes", "File bytes read from storage",
           counters=(("storage_read_bytes", ""),)),
    _Total("snic_write_bytes", "File bytes written to storage",
           counters=(("storage_write_bytes", ""),)),
    _Total("storage_read_blocks", "Blocks read, by outcome", "status",
           prefix="storage_read_blocks_"),
    _Total("storage_write_blocks", "Blocks written, by outcome", "status",
           prefix="storage_write_blocks_"),
    _Total("checksum_failures", "Stored blocks that were not what their name promises",
           counters=(("storage_read_blocks_corrupt", ""),)),
    _Total("evicted_blocks", "Blocks removed to make room",
           counters=(("storage_evicted_blocks", ""),)),
    _Total("evicted_bytes", "File bytes removed to make room",
           counters=(("storage_evicted_bytes", ""),)),
    _Total("disk_full_bytes", "Of these, bytes that went because the disk or its quota was full",
           counters=(("storage_disk_full_bytes", ""),)),
    _Total("recomputed_loads", "Loads given up, whose hit tokens were computed again",
           counters=(("loads_failed", ""),)),
    _Total("preemptions", "Times that vLLM took a request's KV cache away and began it again",
           counters=(("preemptions", ""),)),
    _Total("preempted_tokens", "Tokens of preempted requests that had KV, by what became of it: "
           "read back from storage or host memory (restored), or computed again (recomputed)",
           "fate", counters=(("preempted_restored_tokens", "restored"),
                             ("preempted_recomputed_tokens", "recomputed"))),
    _Total("failed_prefills", "Prefills that could not hand their KV on",
           counters=(("prefills_failed", ""),)),
    _Total("expired_sessions", "Sessions closed at their deadline",
           counters=(("sessions_expired", ""),)),
    _Total("unpersisted_blocks", "Blocks given up on before they were written",
           counters=(("persist_dropped_blocks", ""),)),
    _Total("read_wait_seconds", "Time that storage reads waited for their turn",
           counters=(("read_wait_seconds", ""),)),
    _Total("compute_network_bytes", "KV between PE and DE: hit blocks to the PE (d2), then hit "
           "(push_hit) and miss (push_miss) blocks to the DE", "kind",
           counters=(("d2_bytes", "d2"), ("push_hit_bytes", "push_hit"),
                     ("push_miss_bytes", "push_miss"))),
    _Total("copied_bytes", "KV between host and device memory", "direction",
           counters=(("host_to_device_bytes", "host_to_device"),
                     ("device_to_host_bytes", "device_to_host"))),
    _Total("moved_twice_bytes", "KV put back into HBM for a further step of the same prompt, where "
           "layers take turns",
           counters=(("moved_twice_bytes", ""),)),
    _Total("transfers", "Transfers between engines that were begun",
           counters=(("agent_transfers", ""),)),
    _Total("transfer_failures", "Transfers that failed, timeouts included",
           counters=(("agent_failures", ""),)),
    _Total("transfer_timeouts", "Transfers that passed their deadline",
           counters=(("agent_timeouts", ""),)),
    _Total("connections_lost", "Connections between engines that broke",
           counters=(("agent_connections_lost", ""),)),
    _Total("attention_seconds", "Time in attention, all layers",
           counters=(("attention_seconds", ""),)),
)  # fmt: skip
OTHER: Final = "engine_events"

_GAUGES: Final[dict[str, tuple[str, Callable[[Member], float]]]] = {
    "engine_up": ("Whether the engine gets work", lambda m: m.usable),
    "engine_failing": ("Whether a part of the engine died", lambda m: bool(m.failing)),
    "engine_sessions": ("Open sessions", lambda m: m.stats.sessions),
    "engine_transfers": ("Transfers under way", lambda m: m.stats.transfers),
    "engine_running_requests": ("Requests in the batch", lambda m: m.stats.running),
    "engine_waiting_requests": ("Requests waiting inside the engine", lambda m: m.stats.waiting),
    "read_queue_tokens": (
        "Tokens waiting in, or being read by, storage reads",
        lambda m: m.stats.read_queue_tokens,
    ),
    "hbm_used_tokens": ("KV cache in use", lambda m: m.stats.hbm_tokens_used),
    "hbm_capacity_tokens": ("KV cache", lambda m: m.stats.hbm_tokens_total),
    "layer_regions": (
        "Layers whose KV the engine holds at a time; 0 where it holds all",
        lambda m: m.hello.layer_regions,
    ),
    "buffer_used_slots": ("Staging memory in use", lambda m: m.stats.buffer_slots_used),
    "buffer_capacity_slots": ("Staging memory", lambda m: m.stats.buffer_slots_total),
}


class EngineCollector(Collector):
    """Registered with a registry; asked at every scrape."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """Every family, also those without a sample yet."""
        engines = self._view.engines()
        yield from self._front()
        yield from self._roles(engines)
        for name, (text, of) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"dualpath_{name}", text, labels=_ENGINE)
            for member in engines:
                gauge.add_metric([member.name, member.hello.node], float(of(member)))
            yield gauge
        yield from _totals(engines)

    def _front(self) -> Iterator[Metric]:
        figures = self._view.figures()
        for name, value in figures.items():
            if name in FRONT_TOTALS:
                yield CounterMetricFamily(f"dualpath_{name}", FRONT_TOTALS[name], value=value)
            else:
                yield GaugeMetricFamily(f"dualpath_{name}", FIGURES[name], value=value)
        by_node = self._view.node_figures()
        for name, text in NODE_FIGURES.items():
            gauge = GaugeMetricFamily(f"dualpath_{name}", text, labels=["node"])
            for node, value in by_node[name].items():
                gauge.add_metric([node], value)
            yield gauge

    def _roles(self, engines: list[Member]) -> Iterator[Metric]:
        expected = GaugeMetricFamily(
            "dualpath_engines_expected", "Engines of the cluster description", labels=["role"]
        )
        usable = GaugeMetricFamily(
            "dualpath_engines_usable", "Engines that get work", labels=["role"]
        )
        for role, count in self._view.expected().items():
            expected.add_metric([role], count)
            usable.add_metric([role], sum(m.usable and m.role.value == role for m in engines))
        yield expected
        yield usable


def _totals(engines: list[Member]) -> Iterator[Metric]:
    named = {counter for total in TOTALS for counter, _ in total.counters}
    prefixes = tuple(total.prefix for total in TOTALS if total.prefix)
    for total in TOTALS:
        labels = [*_ENGINE, total.label] if total.label else list(_ENGINE)
        family = CounterMetricFamily(f"dualpath_{total.name}", total.text, labels=labels)
        for member in engines:
            counters = member.stats.counters
            pairs = list(total.counters)
            if total.prefix:
                pairs += [
                    (name, name.removeprefix(total.prefix))
                    for name in counters
                    if name.startswith(total.prefix)
                ]
            for counter, kind in pairs:
                if counter in counters:
                    own = [kind] if total.label else []
                    family.add_metric([member.name, member.hello.node, *own], counters[counter])
        yield family
    other = CounterMetricFamily(
        f"dualpath_{OTHER}", "Further totals of the engine, by name", labels=[*_ENGINE, "name"]
    )
    for member in engines:
        for name, value in member.stats.counters.items():
            if name not in named and not name.startswith(prefixes):
                other.add_metric([member.name, member.hello.node, name], value)
    yield other
