"""InfiniBand: the fragment of opensm.conf that makes virtual lanes of the two classes.

The subnet manager programs every port's arbitration from these tables (opensm's
doc/QoS_management_in_OpenSM.txt, section 7; IBA 7.6.9). Weights count 64 bytes; after
``high_limit`` times 4 KiB of high-priority data the low table gets one chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dualpath.config import ConfigError
from dualpath.fabric import (
    DROP_LANE,
    UNBOUNDED_HIGH_LIMIT,
    FabricConfig,
    parse_lanes,
    parse_sl2vl,
)
from dualpath.transfer.qos.text import File, Rendered

WEIGHT_BYTES: Final = 64
_MTU_BYTES: Final = 4096
FILE_NAME: Final = "opensm.conf"
_PORT_KINDS: Final = ("ca", "rtr", "sw0", "swe")
"""Channel adapters, routers, switches' own port and their external ports. Each falls back to the
general setting only if it stands nowhere in the file, and opensm's sample file names them all."""


def lane_weights(table: str) -> dict[int, int]:
    """Weight of each lane, repeated entries added up."""
    weights: dict[int, int] = {}
    for lane, weight in parse_lanes(table):
        weights[lane] = weights.get(lane, 0) + weight
    return weights


def render(fabric: FabricConfig) -> Rendered:
    """The fragment; append it to opensm.conf and restart opensm, or send it SIGHUP.

    Raises:
        ConfigError: a class would never be sent.
    """
    kv_lane, model_lane = lanes(fabric)
    ib = fabric.ib
    lines = [
        f"# Model traffic: service level {fabric.model.sl}, virtual lane {model_lane}.",
        f"# KV traffic: service level {fabric.kv.sl}, virtual lane {kv_lane}.",
        "qos TRUE",
    ]
    for prefix in ("qos", *(f"qos_{kind}" for kind in _PORT_KINDS)):
        lines += [
            f"{prefix}_max_vls {ib.max_vls}",
            f"{prefix}_high_limit {ib.high_limit}",
            f"{prefix}_vlarb_high {_joined(ib.vlarb_high)}",
            f"{prefix}_vlarb_low {_joined(ib.vlarb_low)}",
            f"{prefix}_sl2vl {_joined(ib.sl2vl)}",
        ]
    text = "\n".join(lines) + "\n"
    return Rendered((File(FILE_NAME, text),), tuple(_warnings(fabric, kv_lane, model_lane)))


def lanes(fabric: FabricConfig) -> tuple[int, int]:
    """Virtual lanes of KV and of model traffic.

    Raises:
        ConfigError: a class is dropped, or its lane has no weight anywhere.
    """
    sl2vl = parse_sl2vl(fabric.ib.sl2vl)
    found = []
    for name, level in (("kv", fabric.kv.sl), ("model", fabric.model.sl)):
        lane = sl2vl[level]
        if lane == DROP_LANE:
            raise ConfigError(
                f"fabric.ib.sl2vl: service level {level} ({name}) maps to lane 15, which drops; "
                "give it a lane below max_vls"
            )
        tables = (fabric.ib.vlarb_high, fabric.ib.vlarb_low)
        if not any(lane_weights(table).get(lane) for table in tables):
            raise ConfigError(
                f"fabric.ib.vlarb_low: lane {lane} ({name}) has no weight in either table, so "
                "nothing of it is ever sent; give it one"
            )
        found.append(lane)
    return found[0], found[1]


def _warnings(fabric: FabricConfig, kv_lane: int, model_lane: int) -> Iterator[str]:
    ib = fabric.ib
    high, low = lane_weights(ib.vlarb_high), lane_weights(ib.vlarb_low)
    if ib.high_limit == UNBOUNDED_HIGH_LIMIT:
        yield (
            "fabric.ib.high_limit: 255 is unbounded: KV starves while model traffic flows; "
            "the paper uses 240"
        )
    if high.get(kv_lane):
        yield f"fabric.ib.vlarb_high: lane {kv_lane} (KV) is served as model traffic is; weight 0"
    if not high.get(model_lane):
        yield f"fabric.ib.vlarb_high: lane {model_lane} (model) has no weight there: no priority"
    if not low.get(kv_lane):
        yield f"fabric.ib.vlarb_low: lane {kv_lane} (KV) has no weight there: no guarantee"
    for name, table in (("vlarb_high", high), ("vlarb_low", low)):
        odd = [lane for lane, weight in table.items() if weight * WEIGHT_BYTES % _MTU_BYTES]
        if odd:
            yield (
                f"fabric.ib.{name}: the weights of lanes {odd} are no multiple of 64, a packet of "
                "4 KiB: arbitration will be uneven"
            )


def _joined(text: str) -> str:
    return "".join(text.split())
