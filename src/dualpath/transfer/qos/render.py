"""All files for a fabric, from the cluster file."""

from __future__ import annotations

from typing import Final

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.fabric import Fabric
from dualpath.transfer.qos import env, opensm, roce, tc
from dualpath.transfer.qos.text import File, Rendered

_ENV_FILE: Final = "qos.env"


def render(config: ClusterConfig, fabric: Fabric) -> Rendered:
    """What arbiters and libraries have to be told.

    Over TCP each node has a script and an environment file of its own, since its interface and
    rate are its own; elsewhere one of each serves all.

    Raises:
        ConfigError: the cluster file lacks what this fabric needs, or a class would starve.
    """
    match fabric:
        case Fabric.TCP:
            parts = [_tcp(config, node) for node in config.nodes]
        case Fabric.IB:
            parts = [opensm.render(config.fabric), _environment(config, fabric)]
        case Fabric.ROCE:
            parts = [roce.render(config.fabric), _environment(config, fabric)]
    warnings = dict.fromkeys(warning for part in parts for warning in part.warnings)
    return Rendered(tuple(file for part in parts for file in part.files), tuple(warnings))


def _tcp(config: ClusterConfig, node: NodeConfig) -> Rendered:
    script = tc.render(config, node)
    variables = env.render(config, node, Fabric.TCP, f"qos-{node.name}.env")
    return Rendered((*script.files, variables), script.warnings)


def _environment(config: ClusterConfig, fabric: Fabric) -> Rendered:
    file: File = env.render(config, config.nodes[0], fabric, _ENV_FILE)
    return Rendered((file,))
