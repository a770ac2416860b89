"""Looks at a running lab a few times a second: kernel counters and the engines' read queues."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from dualpath.lab.names import CNIC, SNIC
from dualpath.lab.network import LabNetwork
from dualpath.report.lab.bounds import NodeSample, Sample
from dualpath.report.lab.results import NodeBytes

INTERVAL_S: Final = 0.2


class Watched(Protocol):
    """What can be sampled."""

    @property
    def network(self) -> LabNetwork:
        """Its hosts."""

    async def state(self) -> dict[str, Any]:
        """``engines``, with ``node`` and ``stats``; other nodes are taken to read nothing."""


@asynccontextmanager
async def sampled(lab: Watched) -> AsyncIterator[list[Sample]]:
    """A list that grows during the block; its first and last entries are of begin and end.

    Raises:
        LabError, RequestFailed: a look failed; told when the block is left.
    """
    samples: list[Sample] = []
    start_s = time.monotonic()
    samples.append(await _look(lab, start_s))
    watching = asyncio.create_task(_watch(lab, start_s, samples))
    try:
        yield samples
    finally:
        watching.cancel()
        await asyncio.wait([watching])
    if not watching.cancelled():
        watching.result()
    samples.append(await _look(lab, start_s))


def carried(samples: Sequence[Sample]) -> dict[str, NodeBytes]:
    """What each node's NICs carried between the first and the last look."""
    first, last = samples[0].nodes, samples[-1].nodes
    names = NodeBytes.__struct_fields__
    return {
        node: NodeBytes(**{name: getattr(at, name) - getattr(first[node], name) for name in names})
        for node, at in last.items()
    }


async def _watch(lab: Watched, start_s: float, samples: list[Sample]) -> None:
    due_s = start_s
    while True:
        due_s = max(due_s + INTERVAL_S, time.monotonic())
        await asyncio.sleep(due_s - time.monotonic())
        samples.append(await _look(lab, start_s))


async def _look(lab: Watched, start_s: float) -> Sample:
    state = await lab.state()
    nics = await asyncio.to_thread(lab.network.nic_bytes)
    queues = {engine["node"]: engine["stats"]["read_queue_tokens"] for engine in state["engines"]}
    return Sample(
        t_s=time.monotonic() - start_s,
        nodes={
            node: NodeSample(
                snic_rx_bytes=nics[node][SNIC].rx_bytes,
                snic_tx_bytes=nics[node][SNIC].tx_bytes,
                cnic_rx_bytes=nics[node][CNIC].rx_bytes,
                cnic_tx_bytes=nics[node][CNIC].tx_bytes,
                queue_tokens=queues.get(node, 0),
            )
            for node in lab.network.nodes
        },
    )
