"""RoCE: the script that makes lossless, weighted traffic classes of the NIC's priorities.

Packets are sorted by DSCP into priorities, each lossless one into the traffic class of its own
number. The same classes must be made on every switch: PFC and weights act per hop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dualpath.config import ConfigError
from dualpath.fabric import NUM_PRIORITIES, FabricConfig
from dualpath.transfer.qos.text import File, Rendered

FILE_NAME: Final = "roce-qos.sh"
_PERCENT: Final = 100


def weights(fabric: FabricConfig) -> tuple[int, ...]:
    """Percent of the link guaranteed to each traffic class, 0 to 7; 0 for strict ones.

    KV gets ``kv_share`` rounded, at least 1 (mlnx_qos takes whole percents), unless all weights
    are given; what the others cannot share evenly goes to model traffic.

    Raises:
        ConfigError: there are too many lossless classes for the percents left.
    """
    roce = fabric.roce
    given = dict(zip(roce.lossless, roce.weights, strict=True)) if roce.weights else {}
    if not given:
        others = [priority for priority in roce.lossless if priority != roce.kv_priority]
        kv = max(1, round(fabric.kv_share * _PERCENT))
        each, rest = divmod(_PERCENT - kv, len(others))
        if each < 1:
            raise ConfigError(f"fabric.kv_share: {fabric.kv_share} leaves the others nothing")
        given = dict.fromkeys(others, each) | {roce.kv_priority: kv}
        given[roce.model_priority] += rest
    return tuple(given.get(priority, 0) for priority in range(NUM_PRIORITIES))


def render(fabric: FabricConfig) -> Rendered:
    """A script that configures the interfaces named on its command line."""
    roce = fabric.roce
    priorities = range(NUM_PRIORITIES)
    pfc = _list(int(priority in roce.lossless) for priority in priorities)
    algorithms = _list("ets" if priority in roce.lossless else "strict" for priority in priorities)
    text = f"""\
#!/bin/sh
# Usage: {FILE_NAME} INTERFACE...   (needs mlnx_qos and root)
#
# The interfaces are those of the compute NICs (ls /sys/class/infiniband/*/device/net).
# Model traffic: DSCP {fabric.model.dscp}, priority {roce.model_priority}.
# KV traffic: DSCP {fabric.kv.dscp}, priority {roce.kv_priority}.
# Lossless priorities {_list(roce.lossless)}: each in the traffic class of its number, with PFC.
# The settings do not outlive a reboot. Make the same classes on the switches.
set -eu
[ $# -gt 0 ] || {{ echo "usage: $0 INTERFACE..." >&2; exit 2; }}
for interface in "$@"; do
    # mlnx_qos refuses --trust and --dscp2prio in one call.
    mlnx_qos -i "$interface" --trust dscp
    mlnx_qos -i "$interface" --dscp2prio set,{fabric.model.dscp},{roce.model_priority} \\
        --dscp2prio set,{fabric.kv.dscp},{roce.kv_priority}
    mlnx_qos -i "$interface" --pfc {pfc}
    mlnx_qos -i "$interface" --prio_tc {_list(priorities)} \\
        --tsa {algorithms} \\
        --tcbw {_list(weights(fabric))}
done
"""
    return Rendered((File(FILE_NAME, text, executable=True),), tuple(_warnings(fabric)))


def _warnings(fabric: FabricConfig) -> Iterator[str]:
    roce = fabric.roce
    shares = weights(fabric)
    if shares[roce.kv_priority] >= shares[roce.model_priority]:
        yield (
            f"fabric.roce.weights: KV is guaranteed {shares[roce.kv_priority]} %, model traffic "
            f"{shares[roce.model_priority]} %: KV will slow the model down"
        )
    if not roce.weights and fabric.kv_share * _PERCENT < 1:
        yield f"fabric.kv_share: {fabric.kv_share} becomes 1 %: mlnx_qos takes whole percents"


def _list(items: Iterable[object]) -> str:
    return ",".join(str(item) for item in items)
