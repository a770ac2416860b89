"""What a policy must be able to do.

A policy looks at engines, groups and nodes and never changes them: the scheduler books every choice
before it asks for the next one. All calls come from the scheduler's one thread. An exception from a
policy leaves the request in its queue and reaches the caller of ``fetch``.

During one fetch the loads of the group's engines only rise (they fall between fetches), so a
chooser made for one fetch may keep a heap of them and correct it as it goes.
"""

from __future__ import annotations

from typing import Protocol

from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.settings import SchedulerSettings
from dualpath.scheduler.state import Engine, Group, Node
from dualpath.scheduler.types import ReadPlan, Request


class PrefillChooser(Protocol):
    """Chooses PEs during one fetch."""

    def choose(self, tokens: int) -> Engine | None:
        """The PE for the request of ``tokens`` prompt tokens at the head of the FIFO.

        Called once per request in FIFO order; None ends the fetch and leaves the head where it is.
        """
        ...


class PrefillPolicy(Protocol):
    """PE selection. Built once per scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None: ...

    def open(self, group: Group, cluster: Cluster) -> PrefillChooser:
        """A chooser for a fetch of ``group``; called when a request waits and ``group`` has an
        active engine."""
        ...


class DecodeChooser(Protocol):
    """Chooses DEs during one fetch (phase 2)."""

    def choose(self, tokens: int, need: int) -> Engine | None:
        """The DE for the head of the private queue: ``tokens`` prompt tokens, ``need`` of HBM.

        Must be an active engine of the group with ``free >= need``. None ends the fetch.
        """
        ...


class DecodePolicy(Protocol):
    """DE selection. Built once per scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None: ...

    def place(self, need: int, cluster: Cluster) -> Group | None:
        """Phase 1: the group whose private queue takes a request that needs ``need`` tokens of HBM.

        Must have ``largest >= need``; None parks the request until an engine joins.
        """
        ...

    def open(self, group: Group, waiting_tokens: int) -> DecodeChooser:
        """A chooser for a fetch of ``group``; ``waiting_tokens`` is sum len(R), see
        docs/scheduler.md."""
        ...


class ReadPathPolicy(Protocol):
    """Read path choice. Built once per scheduler."""

    def __init__(self, settings: SchedulerSettings) -> None: ...

    def plan(self, request: Request, prefill: Node, decode: Node) -> ReadPlan:
        """Who reads the hit of ``request`` (never empty); whole blocks that sum up to the hit.

        Called once per request, after both sides were chosen; the plan is final.
        """
        ...
