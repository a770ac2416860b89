"""Whether traffic classes are in force on this machine, for any fabric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.fabric import Fabric
from dualpath.transfer.qos.check_ib import check_ib
from dualpath.transfer.qos.check_roce import check_roce
from dualpath.transfer.qos.check_tc import check_tc
from dualpath.transfer.qos.system import System
from dualpath.transfer.qos.verdict import Check, Counted, Verdict, overall

_CHECKS: Final = {Fabric.TCP: check_tc, Fabric.IB: check_ib, Fabric.ROCE: check_roce}


@dataclass(frozen=True, slots=True)
class Report:
    """All that was looked at.

    Attributes:
        checks: at least one, even if it only says that nothing can be told.
        counted: bytes of each class while counters were watched; empty where there are none.
    """

    checks: tuple[Check, ...]
    counted: tuple[Counted, ...]

    @property
    def verdict(self) -> Verdict:
        """Over everything."""
        return overall(self.checks)


def check(
    config: ClusterConfig,
    nodes: Sequence[NodeConfig],
    fabric: Fabric,
    system: System,
    interval_s: float,
) -> Report:
    """Look at the compute NICs of ``nodes``, all of which are on this machine.

    Args:
        interval_s: how long the counters of each node are watched; 0 for not at all.

    Raises:
        ConfigError: the cluster file does not say what ought to be in force.
    """
    checks: list[Check] = []
    counted: list[Counted] = []
    for node in nodes:
        found, bytes_sent = _CHECKS[fabric](config, node, system, interval_s)
        checks += found
        counted += bytes_sent
    if not checks:
        checks.append(Check("this machine", "nodes", Verdict.UNKNOWN, "no node of the file is it"))
    return Report(tuple(checks), tuple(counted))
