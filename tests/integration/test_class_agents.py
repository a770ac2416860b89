"""Real NIXL agents of both classes on one NIC, and what happens when their ports run out."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from dualpath.config import ClusterConfig, ConfigError, parse
from dualpath.transfer.class_agent import class_agent, class_settings
from dualpath.transfer.errors import AgentSetupError
from dualpath.transfer.listening import has_free_port
from dualpath.transfer.qos.classes import TrafficClass

pytestmark = pytest.mark.integration


def make(kv: str, model: str = "", kind: str = "tcp", device: str = "lo") -> ClusterConfig:
    nodes = [
        {"name": name, "role": role, "host": host, "cnic": {"device": device}}
        for name, role, host in (("p", "prefill", "127.0.0.1"), ("d", "decode", "127.0.0.2"))
    ]
    fabric = {"kind": kind, "kv": {"ports": kv}, "model": {"ports": model}}
    return parse({"model": {"path": "x"}, "nodes": nodes, "fabric": fabric})


def listening() -> set[tuple[str, int]]:
    """Addresses and TCP ports on which this process listens."""
    ours = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # the listing's own
        if target.startswith("socket:["):
            ours.add(target.removeprefix("socket:[").removesuffix("]"))
    rows = [row.split() for row in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in ours]
    return {
        (str(ipaddress.ip_address(int(host, 16).to_bytes(4, "little"))), int(port, 16))
        for host, port in places
    }


async def test_each_class_of_a_nic_has_an_agent_in_its_own_ports() -> None:
    config = make("23510-23519", "23500-23509")
    node = config.nodes[0]
    before = listening()
    async with (
        class_agent("model/1", config, node, TrafficClass.MODEL),
        class_agent("kv/1", config, node, TrafficClass.KV),
    ):
        (_, first), (_, second) = sorted(listening() - before, key=lambda place: place[1])
    assert first in range(23500, 23510) and second in range(23510, 23520)


async def test_a_node_on_loopback_listens_nowhere_else() -> None:
    config = make("", device="")
    before = listening()
    async with class_agent("kv/1", config, config.nodes[0], TrafficClass.KV):
        assert {host for host, _ in listening() - before} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("kind", "model", "kv"), [("ib", (3, None), (2, None)), ("roce", (None, 104), (None, 72))]
)
def test_marks_reach_ucx(
    kind: str, model: tuple[int | None, int | None], kv: tuple[int | None, int | None]
) -> None:
    config = make("23510-23519", kind=kind, device="mlx5_0:1")
    for traffic, expected in ((TrafficClass.MODEL, model), (TrafficClass.KV, kv)):
        settings = class_settings(config, config.nodes[0], traffic)
        assert (settings.service_level, settings.traffic_class) == expected
        assert settings.device == "mlx5_0:1"


async def test_ports_that_ran_out_are_refused_and_not_waited_for() -> None:
    """UCX itself would look for a free port for ever."""
    config = make("23520-23521")
    node = config.nodes[0]
    async with (
        class_agent("kv/1", config, node, TrafficClass.KV),
        class_agent("kv/2", config, node, TrafficClass.KV),
    ):
        with pytest.raises(AgentSetupError, match=r"23520-23521 are taken.*fabric\.kv\.ports"):
            class_agent("kv/3", config, node, TrafficClass.KV)
        assert not has_free_port("23520-23521", "lo")
        assert has_free_port("23520-23522", "lo") and has_free_port("", "lo")
    async with class_agent("kv/4", config, node, TrafficClass.KV):
        assert has_free_port("23520-23521", "lo")


def test_a_range_for_fewer_ports_than_engines_is_refused() -> None:
    nodes = [
        {"name": "p", "role": "prefill", "engines": 3},
        {"name": "d", "role": "decode", "engines": 2},
    ]
    data = {"model": {"path": "x"}, "nodes": nodes}
    parse({**data, "fabric": {"kv": {"ports": "20480-20484"}}})
    with pytest.raises(ConfigError, match=r"20480-20483 are too few TCP ports for 5 engines"):
        parse({**data, "fabric": {"kv": {"ports": "20480-20483"}}})
    nodes[1]["host"] = "10.0.0.2"
    parse({**data, "fabric": {"kv": {"ports": "20480-20483"}}})
