"""Prometheus metrics of the front, in a registry of their own.

Engine figures are read from the latest reports at the moment of a scrape.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dualpath.serve.members import Member
from dualpath.serve.record import Outcome, Phase, Record

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600,
)  # fmt: skip


class ClusterView(Protocol):
    """What a scrape looks at. Called in the event loop; must not wait or raise."""

    def engines(self) -> list[Member]:
        """Connected engines."""

    def figures(self) -> dict[str, float]:
        """Gauges of the front by name without prefix, such as ``index_blocks``."""


class FrontMetrics:
    """The front's own counters and histograms."""

    def __init__(self, view: ClusterView) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            "dualpath_requests", "Finished requests", ["outcome", "path", "mode"], registry=registry
        )
        self.first_tokens = Counter(
            "dualpath_first_tokens", "Answers by the engine that sampled token 1", ["engine"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "dualpath_prompt_tokens", "Prompt tokens: hit (from storage) and miss (computed)",
            ["kind"], registry=registry,
        )  # fmt: skip
        self.path_bytes = Counter(
            "dualpath_path_bytes", "Hit bytes read, by side", ["path"], registry=registry
        )
        self.path_blocks = Counter(
            "dualpath_path_blocks", "Hit blocks read, by side", ["path"], registry=registry
        )
        self.split_bytes = Counter(
            "dualpath_split_bytes", "Hit bytes of requests read by both sides", registry=registry
        )
        self.bad_blocks = Counter(
            "dualpath_bad_blocks",
            "Blocks the index had and a reader could not use (computed again)",
            registry=registry,
        )
        self.dropped_blocks = Counter(
            "dualpath_dropped_blocks", "Blocks engines reported gone", ["reason"], registry=registry
        )
        self.retries = Counter(
            "dualpath_retries", "Further tries, by what failed", ["reason"], registry=registry
        )
        self.late = Counter(
            "dualpath_late_messages", "Answers about sessions that were closed", ["message"],
            registry=registry,
        )  # fmt: skip
        self.durable_timeouts = Counter(
            "dualpath_durable_timeouts",
            "Turns answered before their blocks were known to be durable", registry=registry,
        )  # fmt: skip
        self.skipped_blocks = Counter(
            "dualpath_skipped_blocks", "Blocks that could not be written", registry=registry
        )
        self.overdue = Counter(
            "dualpath_close_overdue", "Sessions that were slow to close", registry=registry
        )
        self.errors = Counter(
            "dualpath_internal_errors", "Requests ended by a fault in the front", registry=registry
        )
        self.first_byte = Histogram(
            "dualpath_time_to_first_token_seconds", "Arrival to first byte of the answer",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.phase = Histogram(
            "dualpath_phase_seconds", "Parts of the time to the first token", ["phase"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.duration = Histogram(
            "dualpath_request_seconds", "Arrival to last byte", buckets=_SECONDS, registry=registry
        )
        self.open = Gauge("dualpath_requests_open", "Requests under way", registry=registry)
        for phase in Phase:
            self.phase.labels(phase.value)
        registry.register(_EngineCollector(view))

    def finished(self, record: Record) -> None:
        """Count a request that has ended."""
        self.requests.labels(record.outcome, record.path, record.mode).inc()
        self.duration.observe(record.total_s)
        if record.outcome != Outcome.OK.value:
            return
        self.first_tokens.labels(record.first_token).inc()
        self.prompt_tokens.labels("hit").inc(record.hit_tokens)
        self.prompt_tokens.labels("miss").inc(record.prompt_tokens - record.hit_tokens)
        if record.first_byte_s is not None:
            self.first_byte.observe(record.first_byte_s)
        for name, seconds in record.phases.items():
            self.phase.labels(name).observe(seconds)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, view: ClusterView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        """Gauges and counters of every connected engine."""
        for name, value in self._view.figures().items():
            yield GaugeMetricFamily(f"dualpath_{name}", name.replace("_", " "), value=value)
        gauges = {
            "up": "Whether the engine gets work",
            "sessions": "Open sessions, as the engine counts them",
            "transfers": "Transfers under way",
            "running": "Requests in the batch",
            "waiting": "Requests waiting inside the engine",
            "read_queue_tokens": "Tokens waiting for storage",
            "hbm_tokens_used": "KV cache in use, tokens",
            "hbm_tokens_total": "KV cache, tokens",
            "buffer_slots_used": "PE or DE buffer in use, blocks",
            "buffer_slots_total": "PE or DE buffer, blocks",
        }
        families = {
            name: GaugeMetricFamily(f"dualpath_engine_{name}", text, labels=["engine", "node"])
            for name, text in gauges.items()
        }
        counter = CounterMetricFamily(
            "dualpath_engine", "Totals of the engine, by name", labels=["engine", "node", "name"]
        )
        for member in self._view.engines():
            labels = [member.name, member.hello.node]
            for name, family in families.items():
                value = member.usable if name == "up" else getattr(member.stats, name)
                family.add_metric(labels, float(value))
            for name, total in member.stats.counters.items():
                counter.add_metric([*labels, name], total)
        yield from families.values()
        yield counter
