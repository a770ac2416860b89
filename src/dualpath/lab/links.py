"""The commands that make the lab's networks. Pure: lists of arguments, run by ``network``.

A switch namespace holds a bridge for each network; every host has a cable (veth pair) to the
bridges of its networks. No host routes, so the networks are isolated from each other. A cable from
this machine to the front lets clients in.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Final

from dualpath.config import ClusterConfig, NodeConfig
from dualpath.lab import names
from dualpath.lab.names import FRONT, SWITCH, Host, Net
from dualpath.lab.spec import LabSpec
from dualpath.transfer.qos import tc

Command = tuple[str, ...]

QUEUE_S: Final = 0.03
"""What a NIC's queue may hold. The default of 1,000 packets of up to 64 KiB would be ten seconds
of a slow NIC, in which every small message waits behind bulk data."""
_MIN_QUEUE_BYTES: Final = 192 << 10
"""Three of the largest packets."""
_SETTINGS: Final = """\
echo 0 > /proc/sys/net/ipv4/ip_forward
six=/proc/sys/net/ipv6/conf/all/disable_ipv6
test ! -e $six || echo 1 > $six
"""
"""Forwarding would join the networks; IPv6 would send discovery packets that nobody asked for."""


def namespaces(hosts: list[Host]) -> Iterator[Command]:
    """Every namespace, with its loopback up and nothing but what we put on its wires."""
    for name in (SWITCH, *(host.name for host in hosts)):
        inside = names.namespace(name)
        yield ("ip", "netns", "add", inside)
        yield ("ip", "netns", "exec", inside, "sh", "-c", _SETTINGS)
        yield ("ip", "-n", inside, "link", "set", names.LOOPBACK, "up")


def cables(hosts: list[Host]) -> Iterator[Command]:
    """Bridges, cables and addresses."""
    switch = names.namespace(SWITCH)
    for net in Net:
        yield ("ip", "-n", switch, "link", "add", net.bridge, "type", "bridge")
        yield ("ip", "-n", switch, "link", "set", net.bridge, "up")
    for host in hosts:
        for net in host.nets:
            port = net.port(host.name)
            yield (
                *("ip", "-n", host.namespace, "link", "add", net.value, "type", "veth"),
                *("peer", "name", port, "netns", switch),
            )
            yield ("ip", "-n", switch, "link", "set", port, "master", net.bridge, "up")
            address = f"{net.address(host.number)}/{names.NET_BITS}"
            yield ("ip", "-n", host.namespace, "addr", "add", address, "dev", net.value)
            yield ("ip", "-n", host.namespace, "link", "set", net.value, "up")
    front, device = names.namespace(FRONT), names.MANAGEMENT_DEVICE
    yield (
        *("ip", "link", "add", device, "type", "veth"),
        *("peer", "name", names.MANAGEMENT_NIC, "netns", front),
    )
    here = f"{names.MANAGEMENT_HOST}/{names.MANAGEMENT_BITS}"
    there = f"{names.FRONT_API_HOST}/{names.MANAGEMENT_BITS}"
    yield ("ip", "addr", "add", here, "dev", device)
    yield ("ip", "-n", front, "addr", "add", there, "dev", names.MANAGEMENT_NIC)
    yield ("ip", "link", "set", device, "up")
    yield ("ip", "-n", front, "link", "set", names.MANAGEMENT_NIC, "up")


def limits(spec: LabSpec, config: ClusterConfig, hosts: list[Host]) -> Iterator[Command]:
    """Rates and classes, for both directions of every NIC: on the host's own device what it sends,
    on the switch's end of the cable what it receives.

    The storage host has no limit: the readers' NICs are what is measured.

    Raises:
        ConfigError: the cluster file lacks what the classes need.
    """
    switch = names.namespace(SWITCH)
    for host in hosts:
        if Net.COMPUTE not in host.nets:
            continue
        for inside, device in (
            (host.namespace, Net.STORAGE.value),
            (switch, Net.STORAGE.port(host.name)),
        ):
            yield from _one_class(inside, device, spec.snic_mbit)
        for inside, device in (
            (host.namespace, Net.COMPUTE.value),
            (switch, Net.COMPUTE.port(host.name)),
        ):
            if spec.isolation:
                yield from _two_classes(config, inside, device, spec.cnic_mbit)
            else:
                yield from _one_class(inside, device, spec.cnic_mbit)


def _one_class(inside: str, device: str, mbit: float) -> Iterator[Command]:
    start = ("tc", "-n", inside)
    yield (*start, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "1")
    bits = f"{round(mbit * 1e6)}bit"
    yield (
        *(*start, "class", "add", "dev", device, "parent", "1:", "classid", tc.ROOT_CLASS),
        *("htb", "rate", bits, "ceil", bits, "quantum", "65536"),
    )
    yield _queue(inside, device, tc.ROOT_CLASS, mbit)


def _two_classes(config: ClusterConfig, inside: str, device: str, mbit: float) -> Iterator[Command]:
    """By the script that ``qos render --fabric tcp`` writes for a node: rates and rules are the
    same on every port of the lab."""
    node: NodeConfig = config.nodes[0]
    script = tc.render(config, node).files[0].text
    yield ("ip", "netns", "exec", inside, "sh", "-c", script, tc.file_name(node), device)
    for one in (tc.MODEL_CLASS, tc.KV_CLASS):
        yield _queue(inside, device, one, mbit)


def _queue(inside: str, device: str, class_id: str, mbit: float) -> Command:
    limit_bytes = max(_MIN_QUEUE_BYTES, round(mbit * 1e6 / 8 * QUEUE_S))
    return (
        *("tc", "-n", inside, "qdisc", "add", "dev", device, "parent", class_id),
        *("bfifo", "limit", str(limit_bytes)),
    )


def shown(command: Command) -> str:
    """A command as a person would type it, for messages; scripts are cut to their first line."""
    return shlex.join(part.partition("\n")[0] for part in command)
