"""TCP: the script that makes two htb classes of a node's compute interface.

The root class has the link's rate R. Its children have R less KV's share, and KV's share; both may
borrow up to R. htb serves lower ``prio`` first when it lends what is idle, so KV gets its share
under load and all of an idle link. u32 rules put packets from or to KV's ports, or with KV's DSCP,
into the low child; all else goes to the high one.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from dualpath.config import ClusterConfig, ConfigError, NodeConfig
from dualpath.fabric import TcpMatch
from dualpath.transfer.qos.classes import kv_port_ranges, traffic_class_byte
from dualpath.transfer.qos.text import File, Rendered

ROOT_CLASS: Final = "1:1"
MODEL_CLASS: Final = "1:10"
KV_CLASS: Final = "1:20"
_QUANTUM_BYTES: Final = 65536
"""htb's own choice, rate / 10 bytes, is refused with a warning above 1.6 Mbit/s."""
_MIN_RATE_BITS_S: Final = 8


def port_prefixes(first: int, last: int) -> list[tuple[int, int]]:
    """``(value, mask)`` pairs that match exactly the ports from ``first`` to ``last``.

    u32 matches bits under a mask, so a range is cut into aligned powers of two.
    """
    pairs = []
    while first <= last:
        size = first & -first or 1 << 16
        while first + size - 1 > last:
            size //= 2
        pairs.append((first, 0xFFFF & ~(size - 1)))
        first += size
    return pairs


def kv_share_bits_s(config: ClusterConfig, node: NodeConfig) -> tuple[int, int]:
    """The link's rate and KV's share of it, bits a second.

    Raises:
        ConfigError: the node's link has no rate.
    """
    if not node.cnic.rate.limited:
        raise ConfigError(
            f"nodes.{node.name}.cnic.rate: tc shares out a known rate; give the link's, such as "
            '"100Gbit/s"'
        )
    rate = round(node.cnic.rate * 8)
    return rate, max(_MIN_RATE_BITS_S, round(rate * config.fabric.kv_share))


def render(config: ClusterConfig, node: NodeConfig) -> Rendered:
    """A script that configures one interface of ``node``, or clears it.

    Raises:
        ConfigError: the link's rate or KV's ports are not in the cluster file.
    """
    rate, share = kv_share_bits_s(config, node)
    rules = "\n".join(f'$TC filter add dev "$DEV" {rule}' for rule in _rules(config))
    device = node.cnic.device
    default = f":-{shlex.quote(device)}" if device else ":?name an interface"
    text = f"""\
#!/bin/sh
# Usage: {file_name(node)} [INTERFACE] [clear]   (needs tc and root; run again after changes)
#
# Node {node.name}: model traffic has {100 * (1 - share / rate):g} % of the link and goes first,
# KV has {100 * share / rate:g} %; each may use what the other leaves.
# Configure the switches' ports alike.
set -eu
DEV=${{1{default}}}
TC=${{TC:-tc}}
if [ "${{2:-}}" = clear ]; then
    $TC qdisc del dev "$DEV" root
    exit
fi
# An earlier version of the same classes goes first; there may be none.
$TC qdisc del dev "$DEV" root 2>/dev/null || true
$TC qdisc add dev "$DEV" root handle 1: htb default {MODEL_CLASS.partition(":")[2]}
$TC class add dev "$DEV" parent 1: classid {ROOT_CLASS} {_htb(rate, rate)}
$TC class add dev "$DEV" parent {ROOT_CLASS} classid {MODEL_CLASS} {_htb(rate - share, rate)} prio 0
$TC class add dev "$DEV" parent {ROOT_CLASS} classid {KV_CLASS} {_htb(share, rate)} prio 1
{rules}
"""
    return Rendered((File(file_name(node), text, executable=True),), tuple(_warnings(config)))


def file_name(node: NodeConfig) -> str:
    """Name of a node's script."""
    return f"tc-{node.name}.sh"


def _htb(rate: int, ceil: int) -> str:
    return f"htb rate {rate}bit ceil {ceil}bit quantum {_QUANTUM_BYTES}"


def _rules(config: ClusterConfig) -> Iterator[str]:
    """Rules for KV's packets, IPv4 with preference 1, IPv6 with 2."""
    heads = (
        "parent 1: protocol ip prio 1 u32 match ip protocol 6 0xff",
        "parent 1: protocol ipv6 prio 2 u32 match ip6 protocol 6 0xff",
    )
    if config.fabric.tcp.match is TcpMatch.DSCP:
        byte = traffic_class_byte(config.fabric.kv.dscp)
        yield f"{heads[0]} match ip dsfield {byte:#x} 0xfc flowid {KV_CLASS}"
        yield f"{heads[1]} match ip6 priority {byte:#x} 0xfc flowid {KV_CLASS}"
        return
    ranges = kv_port_ranges(config)
    if not ranges:
        raise ConfigError(
            "fabric.kv.ports: tc tells KV by its TCP ports and none are given; choose a range "
            'outside the ephemeral ports, such as "20480-20511"'
        )
    for first, last in ranges:
        for value, mask in port_prefixes(first, last):
            for head, family in zip(heads, ("ip", "ip6"), strict=True):
                # Data flows both ways on a connection: KV's port is one end's or the other's.
                for end in ("sport", "dport"):
                    yield f"{head} match {family} {end} {value} {mask:#x} flowid {KV_CLASS}"


def _warnings(config: ClusterConfig) -> Iterator[str]:
    if config.fabric.tcp.match is TcpMatch.DSCP:
        yield (
            "fabric.tcp.match: UCX sets no DSCP on TCP: mark KV's ports elsewhere "
            "(docs/traffic.md), or match ports"
        )
