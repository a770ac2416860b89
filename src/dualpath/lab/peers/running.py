"""``lab run peers``: our modes, then every peer, on the same hosts, trace and model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from dualpath.config import Mode
from dualpath.lab.experiments import DUALPATH, PE_ONLY, Case, Experiment, Shape
from dualpath.lab.network import lab_network
from dualpath.lab.peers.cluster import peer_cluster
from dualpath.lab.peers.kinds import Peer
from dualpath.lab.peers.measuring import measure
from dualpath.lab.replaying import RunPlace
from dualpath.lab.running import REFERENCE, Show, run_experiment
from dualpath.lab.spec import LabSpec
from dualpath.lab.summing import jct_s, paired, variant_summary
from dualpath.report.lab.results import RUN, SUMMARY, RunResult, Summary, read, run_folder, write
from dualpath.workload import compare, read_records

PEERS: Final = "peers"
"""The experiment's name."""
EXPERIMENT: Final = Experiment(
    PEERS,
    "Beside vLLM's own ways to keep KV between turns",
    (
        Case(
            "1p1d", 1, 1,
            Shape(agents=6, context_tokens=1536, turns=4, append_tokens=64, gen_tokens=8),
            (PE_ONLY, DUALPATH),
        ),
    ),
)  # fmt: skip
"""The part that is ours."""


async def run_peers(experiment: Experiment, spec: LabSpec, root: Path, show: Show) -> Summary:
    """Run what is missing in ``root`` and write its summary, peers beside our modes.

    Args:
        experiment: ``EXPERIMENT``, with as many repeats as wanted.
        spec: model and rates.

    Raises:
        NotInstalled: a peer's packages cannot be had.
        ResultError, ConfigError, LabError, StartFailed, RunFailed, RequestFailed: see
            ``run_experiment``.
    """
    summary = await run_experiment(experiment, spec, root, show)
    (case,) = experiment.cases
    for peer in Peer:
        await _measure(peer, case, spec, root, show)
    summary = with_peers(summary, case, root)
    write(root / SUMMARY, summary)
    return summary


def _places(peer: Peer, case: Case, root: Path) -> list[RunPlace]:
    return [RunPlace(case, peer.value, repeat, root) for repeat in range(case.repeats)]


async def _measure(peer: Peer, case: Case, spec: LabSpec, root: Path, show: Show) -> None:
    missing = [
        place for place in _places(peer, case, root) if not (place.folder / RUN).exists()
    ]  # fmt: skip
    if not missing:
        return
    wanted = dataclasses.replace(spec, prefill=case.prefill, decode=case.decode, mode=Mode.DUALPATH)
    with show.starting(peer.value) as (listen, ready):
        run_dir = root / "run" / peer.value
        with lab_network(wanted, run_dir) as network:
            async with peer_cluster(peer, network, listen) as lab:
                ready()
                for place in missing:
                    await measure(lab, place, show.replaying)


def with_peers(summary: Summary, case: Case, root: Path) -> Summary:
    """Peers as further variants of the case; token by token they are held to the same plain
    vLLM."""
    (ours,) = summary.cases
    repeats = range(case.repeats)
    runs = {
        name: _runs(root / run_folder(case.name, name, repeat) for repeat in repeats)
        for name in (variant.name for variant in case.variants)
    }
    differences = [summary.first_difference] if summary.first_difference else []
    right = list(read_records(root / case.name / REFERENCE))
    for peer in Peer:
        places = _places(peer, case, root)
        runs[peer.value] = _runs(place.folder for place in places)
        for place in places:
            verdict = compare(right, list(read_records(place.folder)))
            if not verdict.equal:
                differences.append(f"{place.title}: {verdict.first or 'nothing to compare'}")
    peers = {peer.value: variant_summary(peer.value, runs[peer.value], None) for peer in Peer}
    first = case.variants[0].name
    ratios = {name: paired(runs, name, first, jct_s) for name in runs}
    case_summary = msgspec.structs.replace(
        ours,
        variants={**ours.variants, **peers},
        speedup={name: 1 / ratio for name, ratio in ratios.items() if ratio},
    )
    return msgspec.structs.replace(
        summary,
        cases=[case_summary],
        tokens_equal=not differences,
        first_difference=differences[0] if differences else "",
    )


def _runs(folders: Iterable[Path]) -> list[RunResult]:
    return [read(folder / RUN, RunResult) for folder in folders]
