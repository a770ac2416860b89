"""Prometheus metrics of the front, in a registry of their own.

docs/operations.md lists all of them; a test compares. What engines report is in
``engine_metrics``.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dualpath.control.messages import Opened
from dualpath.serve.engine_metrics import ClusterView, EngineCollector
from dualpath.serve.record import Outcome, Phase, Record

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600,
)  # fmt: skip
_TOKEN_SECONDS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1,
)  # fmt: skip


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
        self.generation_tokens = Counter(
            "dualpath_generation_tokens", "Tokens of answers that were completed",
            registry=registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "dualpath_time_to_first_token_seconds",
            "Arrival to token 1 at the front; unknown, and left out, for a whole answer that the "
            "decode engine began",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.second_token = Histogram(
            "dualpath_time_to_second_token_seconds", "Token 1 to token 2 of a streamed answer",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.per_token = Histogram(
            "dualpath_time_per_output_token_seconds",
            "Mean time per token after token 1 of a streamed answer",
            buckets=_TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        self.buffer_wait = Histogram(
            "dualpath_buffer_wait_seconds", "Wait for room in an engine's buffer", ["side"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.read = Histogram(
            "dualpath_read_seconds", "Storage read of one request's hit blocks, queue included",
            ["path"], buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.phase = Histogram(
            "dualpath_phase_seconds", "Parts of the time to the first token", ["phase"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        self.duration = Histogram(
            "dualpath_request_seconds", "Arrival to last byte", buckets=_SECONDS, registry=registry
        )
        self.open = Gauge("dualpath_requests_open", "Requests under way", registry=registry)
        # Looked up once: every request counts in nearly all of them.
        self._phases = {phase.value: self.phase.labels(phase.value) for phase in Phase}
        sides = ("pe", "de")
        self._waits = {side: self.buffer_wait.labels(side) for side in sides}
        self._reads = {side: self.read.labels(side) for side in sides}
        self._bytes = {side: self.path_bytes.labels(side) for side in sides}
        self._blocks = {side: self.path_blocks.labels(side) for side in sides}
        self._hits, self._misses = (self.prompt_tokens.labels(kind) for kind in ("hit", "miss"))
        registry.register(EngineCollector(view))

    def opened(self, side: str, message: Opened) -> None:
        """Count an engine's part of reading a request's hit blocks."""
        self._waits[side].observe(message.wait_s)
        if message.good_blocks:
            self._reads[side].observe(message.read_s)

    def hit(self, side: str, blocks: int, block_bytes: int) -> None:
        """Count the hit blocks that a side has read for a request."""
        if blocks:
            self._blocks[side].inc(blocks)
            self._bytes[side].inc(blocks * block_bytes)

    def finished(self, record: Record) -> None:
        """Count a request that has ended."""
        self.requests.labels(record.outcome, record.path, record.mode).inc()
        self.duration.observe(record.total_s)
        if record.outcome != Outcome.OK.value:
            return
        self.first_tokens.labels(record.first_token).inc()
        self._hits.inc(record.hit_tokens)
        self._misses.inc(record.prompt_tokens - record.hit_tokens)
        self.generation_tokens.inc(record.output_tokens or 0)
        for histogram, seconds in (
            (self.first_token, record.ttft_s),
            (self.second_token, record.ttst_s),
            (self.per_token, record.tpot_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        for name, phase_s in record.phases.items():
            self._phases[name].observe(phase_s)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)
