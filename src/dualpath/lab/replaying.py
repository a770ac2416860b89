"""One run's place among the others of its experiment, and the replays it is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from dualpath.lab.experiments import Case
from dualpath.report.lab.results import run_folder
from dualpath.workload import (
    Progress,
    ReplayOptions,
    ReplayResult,
    Trajectory,
    replay,
    token_agents,
)

Replaying = Callable[[str], AbstractContextManager[Callable[[Progress], None]]]
"""Shows a replay under its title while it goes on."""


class RunFailed(RuntimeError):
    """A run is of no use: agents did not finish, or nothing was stored."""


@dataclass(frozen=True, slots=True)
class RunPlace:
    """A run among the others of its experiment.

    Attributes:
        case, variant, repeat: which one; ``variant`` by its name.
        root: the experiment's folder.
    """

    case: Case
    variant: str
    repeat: int
    root: Path

    @property
    def folder(self) -> Path:
        """The run's own."""
        return self.root / run_folder(self.case.name, self.variant, self.repeat)

    @property
    def title(self) -> str:
        """For progress."""
        return f"{self.case.name} {self.variant} {self.repeat + 1}/{self.case.repeats}"


async def replayed(
    trajectories: Sequence[Trajectory],
    seed: int,
    options: ReplayOptions,
    title: str,
    replaying: Replaying,
) -> ReplayResult:
    """Replay agents of random tokens to their end.

    Raises:
        RunFailed: not all of them finished.
        RequestFailed: the endpoint could not be used.
    """
    agents = token_agents(trajectories, len(trajectories), seed)
    with replaying(title) as progress:
        result = await replay(agents, options, progress=progress)
    if not result.ok or result.figures.failed:
        raise RunFailed(f"{title}: {result.figures.first_error or 'not all agents finished'}")
    return result
