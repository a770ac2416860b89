"""Do the kernel's counters and our metrics tell the same bytes?

A byte that took another way than the NIC it should (memory copied from process to process, shared
memory, a cache, loopback) is in our metrics and not in that NIC's counters. So agreement shows that
there was no such way, and loopback is looked at by itself.

What is compared is payload: the kernel's bytes less ``HEADER_BYTES`` a packet. A read also sends,
and a write also receives, what the file system asks and answers (look-ups, opening, closing); this
is taken off the opposite direction, where it would pass for blocks. What comes along with the
blocks in their own direction is not taken off; it is most of what remains.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from dualpath.lab import glusterfs
from dualpath.lab.cluster import Lab
from dualpath.lab.counting import ClassBytes, NicBytes
from dualpath.lab.names import LOOPBACK, SNIC

TOLERANCE: Final = 0.02
_WAYS: Final = ("read", "write")
MIN_BYTES: Final = 4 << 20
"""Below this a figure says little: a start's look-ups are as much."""


class Flow(enum.Enum):
    """What is compared."""

    READ = "read from storage"
    WRITTEN = "written to storage"
    KV = "KV sent to other engines"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All counters at one moment.

    Attributes:
        nics: the kernel's, by node and device.
        classes: of the compute NICs, by node and class.
        engines: ours, by engine, which is called like its node.
    """

    nics: dict[str, dict[str, NicBytes]]
    classes: dict[str, dict[str, ClassBytes]]
    engines: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One comparison.

    Attributes:
        where: the node.
        kernel_bytes: payload that passed the NIC.
        metric_bytes: what we say.
    """

    where: str
    flow: Flow
    kernel_bytes: int
    metric_bytes: int

    @property
    def error(self) -> float | None:
        """``kernel / metric - 1``; None when there is too little to tell."""
        if max(self.kernel_bytes, self.metric_bytes) < MIN_BYTES:
            return None
        return self.kernel_bytes / self.metric_bytes - 1 if self.metric_bytes else float("inf")

    @property
    def agrees(self) -> bool:
        """Whether it is within ``TOLERANCE``, or too little to tell."""
        return self.error is None or abs(self.error) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Agreement:
    """All comparisons of a stretch of time.

    Attributes:
        lines: two for each node's SNIC, and one for what its compute NIC sends.
        loopback_bytes: what each node sent to itself: vLLM's own messages, and no KV.
    """

    lines: tuple[Line, ...]
    loopback_bytes: dict[str, int]

    @property
    def agrees(self) -> bool:
        """Whether every line does, and no node sent itself as much as counts."""
        return all(line.agrees for line in self.lines) and not self.past_the_nics

    @property
    def past_the_nics(self) -> tuple[str, ...]:
        """Nodes that sent themselves as much as ``MIN_BYTES``."""
        return tuple(node for node, count in self.loopback_bytes.items() if count >= MIN_BYTES)


async def snapshot(lab: Lab) -> Snapshot:
    """All counters now; nothing should be under way (``Lab.drained``).

    Raises:
        RequestFailed: the front does not answer.
    """
    engines = await lab.engine_counters()
    return Snapshot(lab.network.nic_bytes(), lab.network.class_bytes(), engines)


def agreement(before: Snapshot, after: Snapshot) -> Agreement:
    """Compare what was counted between two snapshots. Without isolation nothing tells KV from other
    traffic on the compute network, and that line is missing."""
    lines = []
    loopback = {}
    for node in after.engines:
        nics = {
            device: counted.since(before.nics[node][device])
            for device, counted in after.nics[node].items()
        }
        read, written = (_added(before, after, node, f"storage_{way}_bytes") for way in _WAYS)
        blocks = [_blocks(before, after, node, way) for way in _WAYS]
        received = nics[SNIC].rx_payload_bytes - glusterfs.answered_bytes(blocks[1], written)
        sent = nics[SNIC].tx_payload_bytes - glusterfs.asked_bytes(blocks[0], read)
        lines += [Line(node, Flow.READ, received, read), Line(node, Flow.WRITTEN, sent, written)]
        loopback[node] = nics[LOOPBACK].tx_payload_bytes
        if classes := after.classes[node]:
            kv = classes["kv"].since(before.classes[node]["kv"]).payload_bytes
            # An agent's read is served by a write of its peer: what a node sends, its agent wrote.
            wrote = _added(before, after, node, "agent_write_bytes")
            lines.append(Line(node, Flow.KV, kv, wrote))
    return Agreement(tuple(lines), loopback)


def _blocks(before: Snapshot, after: Snapshot, engine: str, way: str) -> int:
    """Blocks that were read or written, with whatever outcome."""
    prefix = f"storage_{way}_blocks_"
    names = [name for name in after.engines[engine] if name.startswith(prefix)]
    return sum(_added(before, after, engine, name) for name in names)


def _added(before: Snapshot, after: Snapshot, engine: str, name: str) -> int:
    return int(after.engines[engine].get(name, 0) - before.engines[engine].get(name, 0))
