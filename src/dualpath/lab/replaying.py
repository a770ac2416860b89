"""One run's place among the others of its experiment, and the replays it is made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from dualpath.lab.experiments import RUN_LIMIT_S, Case
from dualpath.report.lab.results import ResultError, run_folder
from dualpath.workload import (
    Progress,
    ReplayOptions,
    ReplayResult,
    Trajectory,
    replay,
    token_agents,
)
from dualpath.workload.records import RecordError

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
    limit_s: float = RUN_LIMIT_S,
) -> ReplayResult:
    """Replay agents of random tokens to their end.

    Args:
        limit_s: most time, after which they are stopped.

    Raises:
        RunFailed: not all of them finished.
        RequestFailed: the endpoint could not be used.
        ResultError: ``options.out`` could not be written.
    """
    result = await replayed_for(trajectories, seed, options, title, replaying, limit_s)
    if why := not_ended(result, limit_s):
        raise RunFailed(f"{title}: {why}")
    return result


async def replayed_for(
    trajectories: Sequence[Trajectory],
    seed: int,
    options: ReplayOptions,
    title: str,
    replaying: Replaying,
    limit_s: float,
) -> ReplayResult:
    """The same for ``limit_s`` at most, whether all agents finish or not.

    Raises:
        RequestFailed: the endpoint could not be used.
        ResultError: ``options.out`` could not be written.
    """
    agents = token_agents(trajectories, len(trajectories), seed)
    stop = asyncio.Event()
    clock = asyncio.get_running_loop().call_later(limit_s, stop.set)
    try:
        with replaying(title) as progress:
            return await replay(agents, options, progress=progress, stop=stop)
    except RecordError as error:
        raise ResultError(str(error)) from None
    finally:
        clock.cancel()


def not_ended(result: ReplayResult, limit_s: float) -> str:
    """Why not all agents finished; empty when they did."""
    figures = result.figures
    if result.ok and not figures.failed:
        return ""
    done = f"{figures.agents_done} of {figures.agents} agents finished"
    if figures.first_error:
        return f"{done}: {figures.first_error}"
    return f"{done} within {limit_s:g} s"
