"""Request scheduling: PE, DE and read path. Pure; the front and the simulator share it."""

from dualpath.scheduler.scheduler import Scheduler
from dualpath.scheduler.settings import POLICY_SETS, PolicySet, SchedulerSettings
from dualpath.scheduler.types import (
    Assignment,
    Decisions,
    EngineLoad,
    EngineReport,
    EngineSpec,
    ReadPath,
    ReadPlan,
    Rejection,
    RejectReason,
    Request,
    SchedulerError,
    Snapshot,
)  # fmt: skip

__all__ = [
    "POLICY_SETS", "Assignment", "Decisions", "EngineLoad", "EngineReport", "EngineSpec",
    "PolicySet", "ReadPath", "ReadPlan", "RejectReason", "Rejection", "Request", "Scheduler",
    "SchedulerError", "SchedulerSettings", "Snapshot",
]  # fmt: skip
