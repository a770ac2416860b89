"""Workloads: trace files, generators, statistics, and replay against an endpoint."""

from dualpath.workload.agents import (
    Agent,
    ChatAgent,
    Conversation,
    TokenAgent,
    corpus_conversations,
    token_agents,
)
from dualpath.workload.compare import Comparison, compare
from dualpath.workload.measure import Figures
from dualpath.workload.options import Progress, ReplayOptions, ReplayResult
from dualpath.workload.records import RecordError, RequestRecord, read_records
from dualpath.workload.replay import replay
from dualpath.workload.stats import TraceStats, trace_stats
from dualpath.workload.stream import RequestFailed
from dualpath.workload.trace import Round, TraceError, Trajectory, read_trace, write_trace

__all__ = [
    "Agent",
    "ChatAgent",
    "Comparison",
    "Conversation",
    "Figures",
    "Progress",
    "RecordError",
    "ReplayOptions",
    "ReplayResult",
    "RequestFailed",
    "RequestRecord",
    "Round",
    "TokenAgent",
    "TraceError",
    "TraceStats",
    "Trajectory",
    "compare",
    "corpus_conversations",
    "read_records",
    "read_trace",
    "replay",
    "token_agents",
    "trace_stats",
    "write_trace",
]
