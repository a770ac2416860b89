"""Options of ``simulate`` that make a cluster uneven: stragglers, failures, changing roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dualpath.sim.spec import RolesSpec, SimSpec


def with_trouble(
    spec: SimSpec,
    stragglers: Sequence[str],
    slow_snics: Sequence[str],
    failures: Sequence[str],
    reload_s: float | None,
) -> SimSpec:
    """The same cluster with what the options say on top.

    Args:
        spec: the cluster.
        stragglers: ``NODE=FACTOR`` on the speed of a node's GPUs.
        slow_snics: ``NODE=FACTOR`` on the rate of its SNIC.
        failures: ``NODE@SECOND``.
        reload_s: seconds a node needs to change its role; None: none does.

    Raises:
        ValueError: an option has another form, or its node does not exist.
    """
    cluster = spec.cluster
    cluster = replace(
        cluster,
        compute_scale={**cluster.compute_scale, **dict(_pairs("--straggler", stragglers, "="))},
        snic_scale={**cluster.snic_scale, **dict(_pairs("--slow-snic", slow_snics, "="))},
        failures=(*cluster.failures, *_pairs("--fail", failures, "@")),
    )
    roles = spec.roles if reload_s is None else RolesSpec(reload_s)
    return replace(spec, cluster=cluster, roles=roles)


def _pairs(option: str, texts: Sequence[str], mark: str) -> list[tuple[str, float]]:
    pairs = []
    for text in texts:
        node, found, number = text.partition(mark)
        try:
            value = float(number)
        except ValueError:
            found = ""
        if not node or not found:
            form = f"NODE{mark}{'FACTOR' if mark == '=' else 'SECOND'}"
            raise ValueError(f"{option}: {text!r} is not {form}, such as pe0{mark}0.5")
        pairs.append((node, value))
    return pairs
