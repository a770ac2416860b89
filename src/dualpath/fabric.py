"""The cluster file's ``[fabric]``: how model and KV traffic are kept apart on the compute network.

Two classes (arXiv 2602.21548, section 5): model communication is served first, KV is guaranteed a
small share and may use all that is idle. What tells the classes apart depends on the fabric: a
service level on InfiniBand, a DSCP on RoCE, port ranges or a DSCP over TCP. docs/traffic.md says
what is made of each field.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from typing import Annotated, Final

from msgspec import Meta

from dualpath.section import Section

NUM_SERVICE_LEVELS: Final = 16
NUM_PRIORITIES: Final = 8
DROP_LANE: Final = 15
"""In an SL2VL table: packets of this service level are dropped (IBA 7.6.6)."""
UNBOUNDED_HIGH_LIMIT: Final = 255
"""A ``high_limit`` with which low lanes may starve (opensm's own warning)."""

ServiceLevel = Annotated[int, Meta(ge=0, lt=NUM_SERVICE_LEVELS)]
Dscp = Annotated[int, Meta(ge=0, lt=64)]
Priority = Annotated[int, Meta(ge=0, lt=NUM_PRIORITIES)]


class Fabric(enum.Enum):
    """What the compute network is made of."""

    TCP = "tcp"
    IB = "ib"
    ROCE = "roce"


class TcpMatch(enum.Enum):
    """What tells KV packets from others over TCP."""

    PORTS = "ports"
    DSCP = "dscp"


def parse_ports(text: str) -> tuple[int, int] | None:
    """First and last port of ``"20480-20511"``; None for an empty text.

    Raises:
        ValueError: not a range of ports, lowest first.
    """
    if not text:
        return None
    match = re.fullmatch(r"([0-9]+)-([0-9]+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError(f"expected ports such as '20480-20511', lowest first, got {text!r}")
    return int(match[1]), int(match[2])


def parse_lanes(text: str) -> tuple[tuple[int, int], ...]:
    """Virtual lanes and weights of ``"0:192,2:64"``, as opensm writes arbitration tables.

    Raises:
        ValueError: a pair that is not ``lane:weight``, a lane above 14, a weight above 255.
    """
    pairs = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+):([0-9]+)\s*", item)
        if match is None or int(match[1]) >= DROP_LANE or int(match[2]) > 255:
            raise ValueError(
                f"expected lane:weight pairs such as '0:192,2:64' (lanes 0-14, weights 0-255), "
                f"got {item.strip()!r}"
            )
        pairs.append((int(match[1]), int(match[2])))
    return tuple(pairs)


def parse_sl2vl(text: str) -> tuple[int, ...]:
    """The virtual lane of each of the 16 service levels.

    Raises:
        ValueError: not 16 lanes from 0 to 15.
    """
    items = [item.strip() for item in text.split(",")]
    if len(items) != NUM_SERVICE_LEVELS or not all(
        item.isdecimal() and int(item) <= DROP_LANE for item in items
    ):
        raise ValueError(f"expected 16 lanes from 0 to 15, separated by commas, got {text!r}")
    return tuple(int(item) for item in items)


def _check(name: str, parser: Callable[[str], object], text: str) -> None:
    try:
        parser(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


class ModelClassConfig(Section, frozen=True):
    """Marks of model traffic: collectives, expert dispatch.

    Attributes:
        ports: ``"low-high"`` TCP ports of its own; empty for all that are not KV's.
        sl: service level on InfiniBand.
        dscp: DSCP on RoCE, or over TCP with ``tcp.match = "dscp"``.
    """

    ports: str = ""
    sl: ServiceLevel = 3
    dscp: Dscp = 26

    def __post_init__(self) -> None:
        _check("ports", parse_ports, self.ports)


class KvClassConfig(Section, frozen=True):
    """Marks of KV traffic.

    Attributes:
        ports: ``"low-high"`` TCP ports for transfers; ``nodes.cnic.ports`` of a node goes first.
        sl: service level on InfiniBand.
        dscp: DSCP on RoCE, or over TCP with ``tcp.match = "dscp"``.
    """

    ports: str = ""
    sl: ServiceLevel = 2
    dscp: Dscp = 18

    def __post_init__(self) -> None:
        _check("ports", parse_ports, self.ports)


class IbConfig(Section, frozen=True):
    """InfiniBand's arbiter, in opensm's words. The defaults are the paper's values.

    Attributes:
        max_vls: virtual lanes in use.
        high_limit: 4 KiB units of high-priority data between two chances of the low table; 255
            would let KV starve.
        vlarb_high: the high-priority table, ``lane:weight`` in 64-byte units.
        vlarb_low: the low-priority table.
        sl2vl: lane of each of the 16 service levels; 15 drops.
    """

    max_vls: Annotated[int, Meta(ge=1, le=15)] = 4
    high_limit: Annotated[int, Meta(ge=0, le=255)] = 240
    vlarb_high: str = "0:192,1:192,2:0,3:192"
    vlarb_low: str = "0:192,1:192,2:64,3:192"
    sl2vl: str = "0,1,2,3,0,0,0,0,0,0,0,0,0,0,0,0"

    def __post_init__(self) -> None:
        for name in ("vlarb_high", "vlarb_low"):
            _check(name, parse_lanes, getattr(self, name))
            for lane, _ in parse_lanes(getattr(self, name)):
                if lane >= self.max_vls:
                    raise ValueError(
                        f"{name}: lane {lane} is not in use: max_vls is {self.max_vls}"
                    )
        _check("sl2vl", parse_sl2vl, self.sl2vl)
        for lane in parse_sl2vl(self.sl2vl):
            if self.max_vls <= lane < DROP_LANE:
                raise ValueError(f"sl2vl: lane {lane} is not in use: max_vls is {self.max_vls}")


class RoceConfig(Section, frozen=True):
    """The Ethernet NIC's arbiter.

    Attributes:
        model_priority: priority of model traffic, of its own traffic class.
        kv_priority: priority of KV traffic.
        lossless: priorities with PFC, each in the traffic class of its own number; the others are
            strict, as congestion notification packets want it.
        weights: percent of the link guaranteed to each of ``lossless``, 100 in all; empty gives KV
            ``kv_share`` and the others equal parts of the rest.
        ecn: the two low bits of the traffic class byte (2: ECN-capable).
    """

    model_priority: Priority = 3
    kv_priority: Priority = 2
    lossless: tuple[Priority, ...] = (0, 1, 2, 3)
    weights: tuple[Annotated[int, Meta(ge=1, le=100)], ...] = ()
    ecn: Annotated[int, Meta(ge=0, le=3)] = 0

    def __post_init__(self) -> None:
        if len(set(self.lossless)) != len(self.lossless):
            raise ValueError("lossless: a priority is named twice")
        for name in ("model_priority", "kv_priority"):
            if getattr(self, name) not in self.lossless:
                raise ValueError(f"{name}: must be one of lossless {list(self.lossless)}")
        if self.model_priority == self.kv_priority:
            raise ValueError("kv_priority: must differ from model_priority")
        if self.weights and len(self.weights) != len(self.lossless):
            raise ValueError(
                f"weights: one for each of lossless, {len(self.lossless)}, got {len(self.weights)}"
            )
        if self.weights and sum(self.weights) != 100:
            raise ValueError(f"weights: must add up to 100, got {sum(self.weights)}")


class TcpConfig(Section, frozen=True):
    """The kernel's arbiter, tc.

    Attributes:
        match: ``ports`` or ``dscp``: what tells KV packets from others. UCX sets no DSCP on TCP:
            something else has to.
    """

    match: TcpMatch = TcpMatch.PORTS


class FabricConfig(Section, frozen=True):
    """Traffic classes of the compute network.

    Attributes:
        kind: ``tcp``, ``ib`` or ``roce``: what marks transfers carry.
        kv_share: part of the link that KV keeps under load (TCP and RoCE).
        model, kv: marks of each class.
        ib, roce, tcp: what ``dualpath qos render`` writes for each fabric.
    """

    kind: Fabric = Fabric.TCP
    kv_share: Annotated[float, Meta(gt=0, le=0.5)] = 0.01
    model: ModelClassConfig = ModelClassConfig()
    kv: KvClassConfig = KvClassConfig()
    ib: IbConfig = IbConfig()
    roce: RoceConfig = RoceConfig()
    tcp: TcpConfig = TcpConfig()

    def __post_init__(self) -> None:
        if self.kv.sl == self.model.sl:
            raise ValueError(f"kv.sl: must differ from model.sl {self.model.sl}")
        if self.kv.dscp == self.model.dscp:
            raise ValueError(f"kv.dscp: must differ from model.dscp {self.model.dscp}")
        kv, model = parse_ports(self.kv.ports), parse_ports(self.model.ports)
        if kv and model and kv[0] <= model[1] and model[0] <= kv[1]:
            raise ValueError(f"kv.ports: {self.kv.ports} overlap model.ports {self.model.ports}")
        lanes = parse_sl2vl(self.ib.sl2vl)
        if lanes[self.kv.sl] == lanes[self.model.sl]:
            raise ValueError(
                f"ib.sl2vl: kv.sl {self.kv.sl} and model.sl {self.model.sl} share virtual lane "
                f"{lanes[self.kv.sl]}; give each a lane of its own"
            )
