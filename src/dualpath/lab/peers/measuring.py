"""One measured run of a peer: forget all, tell the contexts, replay, count."""

from __future__ import annotations

import asyncio
import shutil
import time
from typing import Any, Final

import msgspec

from dualpath.lab.names import CNIC, SNIC
from dualpath.lab.network import LabError, LabNetwork
from dualpath.lab.peers.cluster import PeerLab
from dualpath.lab.peers.kinds import Peer
from dualpath.lab.replaying import Replaying, RunPlace, replayed
from dualpath.lab.sampling import carried, sampled
from dualpath.report.lab.bounds import Busy
from dualpath.report.lab.results import RUN, SAMPLES, RunResult, write, write_samples
from dualpath.workload import ReplayOptions, ReplayResult

_QUIET_BYTES: Final = 50_000
"""Heartbeats and what a router asks of engines stay below this in ``_STEP_S``."""
_STEP_S: Final = 1.0
_SETTLE_S: Final = 120.0


async def measure(lab: PeerLab, place: RunPlace, replaying: Replaying) -> RunResult:
    """Run it and write its files.

    Raises:
        RunFailed: agents did not finish.
        LabError: the peer does not come to rest.
        RequestFailed: the router could not be used.
        ResultError: a file could not be written.
    """
    case, peer = place.case, Peer(place.variant)
    shutil.rmtree(place.folder, ignore_errors=True)  # what an interrupted run has left
    await lab.forget()
    title = f"{place.title}: contexts"
    await replayed(case.shape.warm_up(), case.seed, ReplayOptions(lab.url), title, replaying)
    await settled(lab.network)
    options = ReplayOptions(lab.url, seed=case.seed, aps=case.aps, out=place.folder)
    cpu_before_s = lab.network.cpu_seconds()
    async with sampled(lab) as samples:
        result = await replayed(case.shape.measured(), case.seed, options, place.title, replaying)
        await settled(lab.network)
    cpu_s = lab.network.cpu_seconds()
    run = RunResult(
        case=case.name,
        variant=peer.value,
        repeat=place.repeat,
        mode=peer.value,
        policy="",
        figures=_figures(peer, result),
        nics=carried(samples),
        snic_metric_bytes={},
        busy=Busy(seconds=0.0, share=0.0, read_bytes={}),
        snic_max_over_mean=None,
        bytes_error=None,
        ttft_split_s={},
        cpu_s={name: cpu_s[name] - cpu_before_s[name] for name in cpu_s},
    )
    write_samples(place.folder / SAMPLES, samples)
    write(place.folder / RUN, run)
    return run


async def settled(network: LabNetwork) -> None:
    """Return when no KV is under way: what a turn left behind may be written after its end.

    Raises:
        LabError: that takes too long.
    """
    deadline_s = time.monotonic() + _SETTLE_S
    before = _carried_bytes(network)
    while True:
        await asyncio.sleep(_STEP_S)
        now = _carried_bytes(network)
        if now - before < _QUIET_BYTES:
            return
        if time.monotonic() >= deadline_s:
            raise LabError(f"KV still moves {_SETTLE_S:g} s after the last answer")
        before = now


def _figures(peer: Peer, result: ReplayResult) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.to_builtins(result.figures.to_json())
    if peer is Peer.NIXL_BIDIRECTIONAL:
        # All tokens but the first come at once (``turns``): the gaps between them mean nothing.
        figures |= {"ttst_s": None, "tpot_s": None}
    return figures


def _carried_bytes(network: LabNetwork) -> int:
    nics = network.nic_bytes()
    return sum(nics[node][nic].tx_bytes + nics[node][nic].rx_bytes
               for node in network.nodes for nic in (SNIC, CNIC))  # fmt: skip
