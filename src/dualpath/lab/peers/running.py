"""``lab run peers``: our modes, then every peer, on the same hosts, trace and model."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from dualpath.config import Mode
from dualpath.lab.experiments import DUALPATH, PE_ONLY, Case, Experiment, Shape
from dualpath.lab.gathering import all_equal, gathered, verdicts_of
from dualpath.lab.network import lab_network
from dualpath.lab.peers.cluster import PeerLab, peer_cluster
from dualpath.lab.peers.kinds import Peer
from dualpath.lab.peers.measuring import measure
from dualpath.lab.peers.packages import NotInstalled
from dualpath.lab.replaying import RunPlace
from dualpath.lab.running import Book, Show, Step, do_all, run_experiment
from dualpath.lab.spec import LabSpec
from dualpath.lab.summing import jct_s, paired, variant_summary
from dualpath.report.lab.results import RUN, Failure, RunResult, Summary, read

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
    """Run what is missing in ``root`` and write its summary, peers beside our modes. A peer that
    cannot be had, or fails, is told and left out.

    Args:
        experiment: ``EXPERIMENT``, with as many repeats as wanted.
        spec: model and rates.

    Raises:
        ResultError, ConfigError, NotRemoved, NoEngine: see ``run_experiment``.
    """
    ours = await run_experiment(experiment, spec, root, show)
    (case,) = experiment.cases

    def summarise(failures: Sequence[Failure], skipped: Sequence[str]) -> Summary:
        told = [*ours.failures, *failures]
        return with_peers(gathered(experiment, spec, root, told, skipped), case, root)

    book = Book(root, summarise, show.say)
    for peer in Peer:
        try:
            await _measure(peer, case, spec, book, show)
        except NotInstalled as error:
            book.failed(peer.value, error)
    return book.save()


def _places(peer: Peer, case: Case, root: Path) -> list[RunPlace]:
    return [RunPlace(case, peer.value, repeat, root) for repeat in range(case.repeats)]


async def _measure(peer: Peer, case: Case, spec: LabSpec, book: Book, show: Show) -> None:
    wanted = dataclasses.replace(spec, prefill=case.prefill, decode=case.decode, mode=Mode.DUALPATH)

    def step(place: RunPlace) -> Step[PeerLab]:
        return Step(place.title, lambda lab: measure(lab, place, show.replaying))

    @asynccontextmanager
    async def cluster() -> AsyncIterator[PeerLab]:
        with (
            show.starting(peer.value) as (listen, ready),
            lab_network(wanted, book.root / "run" / peer.value) as network,
        ):
            async with peer_cluster(peer, network, listen) as lab:
                ready()
                yield lab

    places = [one for one in _places(peer, case, book.root) if not (one.folder / RUN).exists()]
    await do_all([step(place) for place in places], peer.value, cluster, book)


def with_peers(summary: Summary, case: Case, root: Path) -> Summary:
    """Peers with runs as further variants of the case; token by token they are held to the same
    plain vLLM."""
    runs = {
        name: _runs([RunPlace(case, name, repeat, root) for repeat in range(case.repeats)])
        for name in (*(variant.name for variant in case.variants), *(peer.value for peer in Peer))
    }
    runs = {name: found for name, found in runs.items() if found}
    places = [
        place for peer in Peer for place in _places(peer, case, root)
        if (place.folder / RUN).exists()
    ]  # fmt: skip
    if not summary.cases or not places:
        return summary
    (ours,) = summary.cases
    verdicts = verdicts_of(case, places, (), root)
    peers = {
        peer.value: variant_summary(runs[peer.value], None, verdicts.equal.get(peer.value))
        for peer in Peer
        if peer.value in runs
    }
    first = case.variants[0].name
    gains = {name: paired(runs, first, name, jct_s) for name in runs}
    case_summary = msgspec.structs.replace(
        ours,
        variants={**ours.variants, **peers},
        speedup={name: gain for name, gain in gains.items() if gain},
    )
    differences = [one for one in (summary.first_difference, *verdicts.differences) if one]
    return msgspec.structs.replace(
        summary,
        cases=[case_summary],
        tokens_equal=all_equal([summary.tokens_equal, *verdicts.equal.values()]),
        first_difference=differences[0] if differences else "",
    )


def _runs(places: Iterable[RunPlace]) -> list[RunResult]:
    paths = [place.folder / RUN for place in places]
    return [read(path, RunResult) for path in paths if path.exists()]
