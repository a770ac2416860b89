"""``simulate``: run agents through a cluster in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dualpath.sim.core import Progress, Simulation
from dualpath.sim.load import Scripts
from dualpath.sim.plan import Plan
from dualpath.sim.result import SimResult
from dualpath.sim.spec import SimSpec
from dualpath.timeline import Timeline
from dualpath.workload.trace import Trajectory

DEFAULT_WARMUP_S = 1200.0
DEFAULT_MEASURE_S = 600.0


def simulate(
    spec: SimSpec,
    trajectories: Iterable[Trajectory],
    *,
    agents: int | None = None,
    aps: float | None = None,
    seed: int = 0,
    warmup_s: float = DEFAULT_WARMUP_S,
    measure_s: float = DEFAULT_MEASURE_S,
    until_steady: bool = False,
    window_s: float = 1.0,
    progress: Progress | None = None,
    timeline: Timeline | None = None,
    decision_log: Callable[[str], object] | None = None,
) -> SimResult:
    """Run agents to their end and say how it went. The same arguments give the same result.

    Offline (``aps`` None): all agents start at second 0 and every request is measured.

    Online with ``agents``: that many arrive, Poisson at ``aps``, and run to their end; every
    request is measured.

    Online without ``agents``: agents arrive Poisson at ``aps`` for ``warmup_s + measure_s``. Those
    requests are measured that are submitted after ``warmup_s``; the run ends when all of them are
    answered or the arrivals are over, whichever is later. It is given up (``overloaded``) when the
    mean TTFT of the latest 200 first tokens or so is above ten times the limit: such a rate is not
    served, and its queues only grow. JCT is that of the agents that end between ``warmup_s`` and
    ``warmup_s + measure_s``. The warm-up should be longer than an agent lives.

    The same ``until_steady``: the run ends by the published rule (``steady``), whatever
    ``warmup_s`` and ``measure_s`` are. Requests answered in its last 150 s are measured; JCT is
    that of all agents that ended. One that does not become steady is ``overloaded``.

    Args:
        spec: cluster, model and mode.
        trajectories: what agents do, read as far as it is needed; with more agents than
            trajectories they are used again, behind a synthetic first round (``load.Scripts``).
        agents, aps, warmup_s, measure_s, until_steady: see above.
        seed: of arrivals and of which trajectory an online agent takes.
        window_s: of the series of storage bytes.
        progress: called about every 5,000 events with a part of the run done in 0 .. 1 and the
            simulated second.
        timeline: gets steps, reads and queues.
        decision_log: gets a line for every call of the scheduler, as the front writes it.

    Raises:
        ValueError: an argument is out of range, or there are no trajectories.
    """
    plan = Plan(agents, aps, seed, warmup_s, measure_s, until_steady)
    simulation = Simulation(
        spec, Scripts(trajectories), plan, window_s, progress, timeline, decision_log
    )
    return simulation.run()
