"""Whether tc keeps KV and model traffic of a node apart.

The rules in force are not compared with those we would write: packets of both classes are run
through them, so that classes made by other means count as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from dualpath.config import ClusterConfig, ConfigError, NodeConfig
from dualpath.fabric import TcpMatch
from dualpath.transfer.qos.classes import kv_port_ranges, traffic_class_byte
from dualpath.transfer.qos.system import System, ToolFailed, ToolMissing
from dualpath.transfer.qos.tc import file_name, kv_share_bits_s
from dualpath.transfer.qos.tc_state import (
    HtbClass,
    TcState,
    ipv4_header,
    ipv6_header,
    parse_classes,
    parse_default,
    parse_filters,
)
from dualpath.transfer.qos.verdict import Check, Counted, Verdict
from dualpath.transfer.qos.watch import watch

_RATE_TOLERANCE: Final = 0.02
"""tc rounds rates when it shows them."""
_EPHEMERAL_PORT: Final = 40000
"""The other end of a connection."""


def check_tc(
    config: ClusterConfig, node: NodeConfig, system: System, interval_s: float
) -> tuple[list[Check], list[Counted]]:
    """Look at one node's compute interface, and watch its counters for ``interval_s``.

    Raises:
        ConfigError: the cluster file says neither rate nor ports, so that there is nothing to
            compare with.
    """
    device = node.cnic.device
    where = f"{node.name} {device}".strip()
    rates = kv_share_bits_s(config, node)
    if config.fabric.tcp.match is TcpMatch.PORTS and not kv_port_ranges(config):
        raise ConfigError(
            "fabric.kv.ports: none are given, so that no packet is known to be KV's; choose a "
            'range such as "20480-20511"'
        )
    if not device:
        todo = f"name it: nodes.{node.name}.cnic.device"
        return [Check(where, "interface", Verdict.UNKNOWN, "the cluster file names none", todo)], []
    try:
        state = _read(system, device)
    except (ToolMissing, ToolFailed, ValueError) as error:
        return [Check(where, "tc", Verdict.UNKNOWN, f"it cannot be told: {error}")], []
    todo = f"run {file_name(node)}, which `dualpath qos render --fabric tcp --out DIR` writes"
    if state is None:
        text = "there are no htb classes: all traffic is one class"
        return [Check(where, "classes", Verdict.NOT_IN_FORCE, text, todo)], []
    kv_ids = {state.classify(header) for header in _kv_headers(config)}
    model_ids = {state.classify(header) for header in _model_headers(config)}
    filters = _check_filters(kv_ids, model_ids)
    if filters:
        return [Check(where, "filters", Verdict.NOT_IN_FORCE, filters, todo)], []
    kv_id, model_id = kv_ids.pop(), model_ids.pop()
    text = f"KV packets go to class {kv_id}, others to {model_id}"
    checks = [Check(where, "filters", Verdict.IN_FORCE, text)]
    kv, model = state.classes.get(kv_id), state.classes.get(model_id)
    if kv is None or model is None:
        text = f"of {kv_id} and {model_id}, to which packets are sent, one does not exist"
        return [*checks, Check(where, "classes", Verdict.NOT_IN_FORCE, text, todo)], []
    for what, wrong, right in (_judge_order(kv, model), _judge_rates(state, kv, model, rates)):
        verdict = Verdict.NOT_IN_FORCE if wrong else Verdict.IN_FORCE
        checks.append(Check(where, what, verdict, wrong or right, todo if wrong else ""))
    ids = model_id, kv_id
    counted = watch([device], lambda one: _sent(system, one, ids), lambda _: where, ids, interval_s)
    return checks, counted


def _read(system: System, device: str) -> TcState | None:
    """None without htb at the root."""
    default = parse_default(system.run(["tc", "-j", "qdisc", "show", "dev", device]))
    if default is None:
        return None
    filters = parse_filters(system.run(["tc", "filter", "show", "dev", device]))
    return TcState(default, _classes(system, device), filters)


def _classes(system: System, device: str) -> dict[str, HtbClass]:
    return parse_classes(system.run(["tc", "-s", "class", "show", "dev", device]))


def _check_filters(kv_ids: set[str], model_ids: set[str]) -> str:
    """What is wrong with where packets go."""
    if shared := sorted(kv_ids & model_ids):
        return f"KV's packets and others go to the same class, {', '.join(shared)}"
    if len(kv_ids) > 1:
        return f"KV's packets go to several classes: {', '.join(sorted(kv_ids))}"
    if len(model_ids) > 1:
        return f"other packets go to several classes: {', '.join(sorted(model_ids))}"
    return ""


def _judge_order(kv: HtbClass, model: HtbClass) -> tuple[str, str, str]:
    if kv.prio > model.prio:
        return "priority", "", f"model traffic (prio {model.prio}) goes before KV (prio {kv.prio})"
    wrong = f"KV has prio {kv.prio}, model traffic {model.prio}: KV's must be the larger number"
    return "priority", wrong, ""


def _judge_rates(
    state: TcState, kv: HtbClass, model: HtbClass, rates: tuple[int, int]
) -> tuple[str, str, str]:
    rate, share = rates
    off = [
        f"{name} is {shown:.0f} bit/s, not {wanted}"
        for name, shown, wanted in (
            ("KV's rate", kv.rate_bits_s, share),
            ("KV's ceil", kv.ceil_bits_s, rate),
            ("the model's rate", model.rate_bits_s, rate - share),
            ("the model's ceil", model.ceil_bits_s, rate),
        )
        if abs(shown - wanted) > _RATE_TOLERANCE * wanted
    ]
    parent = state.classes.get(kv.parent)
    if parent is None or kv.parent != model.parent:
        off.append("the two classes have no common parent to borrow from")
    elif abs(parent.rate_bits_s - rate) > _RATE_TOLERANCE * rate:
        off.append(f"their parent's rate is {parent.rate_bits_s:.0f} bit/s, not {rate}")
    return "rates", "; ".join(off), f"KV is guaranteed {share} of {rate} bit/s"


def _kv_headers(config: ClusterConfig) -> Iterator[bytes]:
    for header in _families(config):
        if config.fabric.tcp.match is TcpMatch.DSCP:
            yield header(_EPHEMERAL_PORT, 1, traffic_class_byte(config.fabric.kv.dscp))
            continue
        for first, last in kv_port_ranges(config):
            for port in range(first, last + 1):
                yield header(_EPHEMERAL_PORT, port, 0)
                yield header(port, _EPHEMERAL_PORT, 0)


def _model_headers(config: ClusterConfig) -> Iterator[bytes]:
    ranges = kv_port_ranges(config)
    near = {first - 1 for first, _ in ranges} | {last + 1 for _, last in ranges}
    outside = [
        port
        for port in sorted(near | {_EPHEMERAL_PORT - 1})
        if not any(first <= port <= last for first, last in ranges)
    ]
    for header in _families(config):
        if config.fabric.tcp.match is TcpMatch.DSCP:
            yield header(_EPHEMERAL_PORT, 1, traffic_class_byte(config.fabric.model.dscp))
            yield header(_EPHEMERAL_PORT, 1, 0)
            continue
        for port in outside:
            yield header(_EPHEMERAL_PORT, port, 0)
            yield header(port, _EPHEMERAL_PORT, 0)


def _families(config: ClusterConfig) -> list[Callable[[int, int, int], bytes]]:
    """Headers of the IP versions in which the nodes reach each other; names count as IPv4's."""
    versions = {":" in node.host for node in config.nodes}
    return [ipv6_header if six else ipv4_header for six in sorted(versions)]


def _sent(system: System, device: str, ids: tuple[str, str]) -> dict[str, int]:
    classes = _classes(system, device)
    if gone := [one for one in ids if one not in classes]:
        raise ValueError(f"class {gone[0]} has vanished")
    return {one: classes[one].sent_bytes for one in ids}
