"""The hardware: nodes with their NICs and buffers, engines, and the groups they work in.

Every link is a queue that serves first come, first served, so all it needs to remember is when it
will be free: a transfer of n bytes ends ``n / rate`` after the later of now and that moment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final

from dualpath.config import Role
from dualpath.sim.load import Agent


class Buffer:
    """Host memory for KV of one node: a fixed size, a line of those who wait for room.

    A release can be announced for a later moment; it is carried out when somebody looks.
    """

    __slots__ = ("capacity", "free", "peak", "releases", "waiting")

    def __init__(self, capacity_bytes: float) -> None:
        self.capacity: Final = capacity_bytes
        self.free = capacity_bytes
        self.peak = 0.0
        self.releases: list[tuple[float, float]] = []
        self.waiting: deque[tuple[float, Agent]] = deque()

    def take(self, now_s: float, size_bytes: float) -> bool:
        """Take ``size_bytes`` if there is room; does not look at who waits."""
        if self.releases:
            self.settle(now_s)
        if size_bytes > self.free:
            return False
        self.free -= size_bytes
        used = self.capacity - self.free
        if used > self.peak:
            self.peak = used
        return True

    def release_at(self, at_s: float, size_bytes: float) -> None:
        """Give back at a later moment."""
        heapq.heappush(self.releases, (at_s, size_bytes))

    def settle(self, now_s: float) -> None:
        """Carry out the releases that are due."""
        releases = self.releases
        while releases and releases[0][0] <= now_s:
            self.free += heapq.heappop(releases)[1]


class Node:
    """A machine.

    Attributes:
        read_free_s, write_free_s: when its SNIC will have done all it was asked, each way.
        reads: ``(end, agent, round)`` of reads not told to the scheduler yet, by their end.
        window: storage bytes read in each window.
        alive: False once it has failed.
    """

    __slots__ = (
        "alive", "buffer", "fetch_group", "index", "name", "rate", "read_bytes", "read_free_s",
        "reads", "role", "wake_s", "window", "write_free_s", "written_bytes",
    )  # fmt: skip

    def __init__(
        self, name: str, index: int, role: Role, snic_bytes_per_s: float, buffer_bytes: float
    ) -> None:
        self.name: Final = name
        self.index: Final = index
        self.role: Final = role
        self.rate: Final = snic_bytes_per_s
        self.buffer: Final = Buffer(buffer_bytes)
        self.read_free_s = 0.0
        self.write_free_s = 0.0
        self.read_bytes = 0.0
        self.written_bytes = 0.0
        self.reads: deque[tuple[float, Agent, int]] = deque()
        self.window: list[float] = []
        self.wake_s = math.inf
        self.alive = True
        self.fetch_group: FetchGroup

    def read(self, now_s: float, size_bytes: float, window_s: float) -> float:
        """Queue a read on the SNIC; when it ends."""
        start = self.read_free_s if self.read_free_s > now_s else now_s
        end = self.read_free_s = start + size_bytes / self.rate
        self.read_bytes += size_bytes
        window = self.window
        first, last = int(start / window_s), int(end / window_s)
        if last >= len(window):
            window.extend([0.0] * (last + 1 - len(window)))
        if first == last:
            window[first] += size_bytes
        else:
            rate = self.rate
            window[first] += ((first + 1) * window_s - start) * rate
            for middle in range(first + 1, last):
                window[middle] += window_s * rate
            window[last] += (end - last * window_s) * rate
        return end

    def write(self, now_s: float, size_bytes: float) -> float:
        """Queue a write on the SNIC; when it is durable."""
        start = self.write_free_s if self.write_free_s > now_s else now_s
        end = self.write_free_s = start + size_bytes / self.rate
        self.written_bytes += size_bytes
        return end


class PrefillEngine:
    """A PE: one GPU, its CNIC, the requests whose KV is at hand.

    Attributes:
        queue: in the order in which their reads ended.
        speed: factor on its compute.
        in_free_s, out_free_s: its CNIC, towards the GPU and away from it.
    """

    __slots__ = ("in_free_s", "name", "node", "out_free_s", "queue", "speed", "step_group")

    def __init__(self, name: str, node: Node, speed: float) -> None:
        self.name: Final = name
        self.node: Final = node
        self.speed: Final = speed
        self.queue: deque[Agent] = deque()
        self.in_free_s = 0.0
        self.out_free_s = 0.0
        self.step_group: PrefillGroup


class PrefillGroup:
    """PEs whose steps begin and end together.

    Attributes:
        ready: ``(end of the read, order, agent)`` of requests that are not in a queue yet.
        queued: requests in the engines' queues.
        batch: the step under way: agents and the tokens each computes.
        wake_s: the moment for which a look is planned.
    """

    __slots__ = ("batch", "busy", "engines", "name", "queued", "ready", "speed", "wake_s")

    def __init__(self, name: str, engines: list[PrefillEngine]) -> None:
        self.name: Final = name
        self.engines = engines
        self.speed = sum(engine.speed for engine in engines)
        self.ready: list[tuple[float, int, Agent]] = []
        self.queued = 0
        self.busy = False
        self.batch: list[tuple[PrefillEngine, Agent, int]] = []
        self.wake_s = math.inf
        for engine in engines:
            engine.step_group = self


class DecodeEngine:
    """A DE: one GPU, its CNIC, its KV memory.

    Attributes:
        seqs: requests that are being decoded.
        hbm_bytes, hbm_peak_bytes: KV memory in use, and the most ever.
    """

    __slots__ = (
        "hbm_bytes", "hbm_peak_bytes", "in_free_s", "name", "node", "out_free_s", "seqs", "speed",
        "step_group",
    )  # fmt: skip

    def __init__(self, name: str, node: Node, speed: float) -> None:
        self.name: Final = name
        self.node: Final = node
        self.speed: Final = speed
        self.seqs = 0
        self.hbm_bytes = 0.0
        self.hbm_peak_bytes = 0.0
        self.in_free_s = 0.0
        self.out_free_s = 0.0
        self.step_group: DecodeGroup


class DecodeGroup:
    """DEs whose steps begin and end together: one clock that counts steps.

    A request that joins when the clock shows v and has n tokens left leaves when it shows v + n,
    whoever comes and goes meanwhile, so one heap serves the group.

    Attributes:
        clock: steps done until ``clock_s``, a fraction of one included.
        step_s: length of a step with the present requests.
        ends: ``(clock at the end, order, agent)``.
        levels: how many engines have how many requests; ``fullest`` is the most, ``seqs`` all
            requests of the group together.
        wake_s: the moment for which a look is planned.
    """

    __slots__ = (
        "clock", "clock_s", "ends", "engines", "fullest", "levels", "name", "seqs", "slowdown",
        "step_s", "wake_s",
    )  # fmt: skip

    def __init__(self, name: str, engines: list[DecodeEngine]) -> None:
        self.name: Final = name
        self.engines = engines
        self.slowdown = 1.0 / min(engine.speed for engine in engines)
        self.clock = 0.0
        self.clock_s = 0.0
        self.step_s = 0.0
        self.ends: list[tuple[float, int, Agent]] = []
        self.levels = [len(engines)]
        self.fullest = 0
        self.seqs = 0
        self.wake_s = math.inf
        for engine in engines:
            engine.step_group = self


class FetchGroup:
    """Engines that fetch work together.

    Attributes:
        phase_s: its fetches are at ``phase_s + k * interval``.
        planned: whether the next fetch is in the event queue.
        told_s: when its nodes last told the scheduler what they had read.
    """

    __slots__ = ("name", "nodes", "phase_s", "planned", "role", "told_s")

    def __init__(self, name: str, role: Role, nodes: list[Node], phase_s: float) -> None:
        self.name: Final = name
        self.role: Final = role
        self.nodes: Final = nodes
        self.phase_s: Final = phase_s
        self.planned = False
        self.told_s = 0.0
        for node in nodes:
            node.fetch_group = self


Event = tuple[float, int, Callable[..., None], object]
"""When, order among equals, what to call, with what."""
