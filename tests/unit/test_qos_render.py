"""What ``qos render`` writes, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dualpath.cli.main import run
from dualpath.config import ClusterConfig, ConfigError, parse
from dualpath.fabric import Fabric
from dualpath.transfer.nixl_backend import UcxSettings
from dualpath.transfer.qos import opensm, roce
from dualpath.transfer.qos.classes import Marks, TrafficClass, kv_port_ranges, marks
from dualpath.transfer.qos.env import variables
from dualpath.transfer.qos.render import render
from dualpath.transfer.qos.tc import port_prefixes

pytestmark = pytest.mark.unit

CNIC = {"device": "cn0", "rate": "200Mbit/s"}


def make(fabric: dict[str, Any] | None = None, **cnic: Any) -> ClusterConfig:
    return parse(
        {
            "model": {"path": "x"},
            "nodes": [
                {"name": "p", "role": "prefill", "cnic": {**CNIC, **cnic}},
                {"name": "d", "role": "decode", "cnic": CNIC},
            ],
            "fabric": {"kv": {"ports": "20480-20511"}, **(fabric or {})},
        }
    )


def files(config: ClusterConfig, fabric: Fabric) -> dict[str, str]:
    return {file.name: file.text for file in render(config, fabric).files}


# ---- marks --------------------------------------------------------------------------------------


def test_each_fabric_marks_in_its_own_way() -> None:
    config = make()
    node = config.nodes[0]

    def both(fabric: Fabric) -> tuple[Marks, Marks]:
        return (
            marks(config, node, TrafficClass.MODEL, fabric),
            marks(config, node, TrafficClass.KV, fabric),
        )

    ports = "20480-20511"
    assert both(Fabric.TCP) == (Marks(), Marks(ports))
    assert both(Fabric.IB) == (Marks(service_level=3), Marks(ports, service_level=2))
    # DSCP 26 and 18 above two ECN bits.
    assert both(Fabric.ROCE) == (Marks(traffic_class=104), Marks(ports, traffic_class=72))
    ecn = make({"roce": {"ecn": 2}})
    assert marks(ecn, node, TrafficClass.MODEL, Fabric.ROCE).traffic_class == 106
    assert marks(make({"kind": "ib"}), node, TrafficClass.KV).service_level == 2


def test_a_nodes_own_ports_go_first_and_count_everywhere() -> None:
    config = make(ports="21000-21009")
    own, other = (marks(config, node, TrafficClass.KV).ports for node in config.nodes)
    assert (own, other) == ("21000-21009", "20480-20511")
    assert kv_port_ranges(config) == ((20480, 20511), (21000, 21009))
    for name in ("tc-p.sh", "tc-d.sh"):
        script = files(config, Fabric.TCP)[name]
        assert "ip dport 20480 0xffe0" in script and "ip dport 21000 0xfff8" in script


def test_agents_get_their_class() -> None:
    settings = UcxSettings("mlx5_0:1", service_level=2, traffic_class=72).engine_config()
    assert settings.split(",")[-2:] == ["IB_SL=2", "IB_TRAFFIC_CLASS=72"]
    assert "IB_" not in UcxSettings("cn0", "20480-20511").engine_config()


@pytest.mark.parametrize(
    ("fabric", "field"),
    [
        ({"kv": {"sl": 3}}, "fabric: kv.sl"),
        ({"kv": {"dscp": 26}}, "fabric: kv.dscp"),
        ({"kv": {"ports": "9-8"}}, "fabric.kv: ports"),
        ({"kv": {"ports": "10-20"}, "model": {"ports": "20-30"}}, "fabric: kv.ports"),
        ({"kv_share": 0.6}, "fabric.kv_share"),
        ({"ib": {"high_limit": 256}}, "fabric.ib.high_limit"),
        ({"ib": {"vlarb_low": "0:256"}}, "fabric.ib: vlarb_low"),
        ({"ib": {"vlarb_high": "4:1"}}, "fabric.ib: vlarb_high: lane 4"),
        ({"ib": {"sl2vl": "0,1,2"}}, "fabric.ib: sl2vl"),
        ({"ib": {"sl2vl": "0,1,4" + ",0" * 13}}, "fabric.ib: sl2vl: lane 4"),
        ({"ib": {"sl2vl": "0,1,2,2" + ",0" * 12}}, "fabric: ib.sl2vl"),
        ({"roce": {"weights": [50, 30, 1, 20]}}, "fabric.roce: weights: must add up to 100"),
        ({"roce": {"weights": [50, 50]}}, "fabric.roce: weights: one for each"),
        ({"roce": {"kv_priority": 5}}, "fabric.roce: kv_priority"),
        ({"roce": {"lossless": [2, 3, 3]}}, "fabric.roce: lossless"),
    ],
)
def test_contradictions_are_refused_by_name(fabric: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        make(fabric)


# ---- InfiniBand ---------------------------------------------------------------------------------


def test_opensm_gets_the_papers_values_for_every_kind_of_port() -> None:
    text = files(make(), Fabric.IB)["opensm.conf"]
    settings = dict(line.split(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert settings["qos"] == "TRUE"
    for kind in ("", "ca_", "rtr_", "sw0_", "swe_"):
        assert settings[f"qos_{kind}max_vls"] == "4"
        assert settings[f"qos_{kind}high_limit"] == "240"
        assert settings[f"qos_{kind}vlarb_high"] == "0:192,1:192,2:0,3:192"
        assert settings[f"qos_{kind}vlarb_low"] == "0:192,1:192,2:64,3:192"
        assert settings[f"qos_{kind}sl2vl"] == "0,1,2,3" + ",0" * 12
    assert len(settings) == 1 + 5 * 5
    tuned = files(make({"ib": {"high_limit": 100, "vlarb_low": "0:64, 2:128, 3:64"}}), Fabric.IB)
    assert "qos_ca_high_limit 100\n" in tuned["opensm.conf"]
    assert "qos_ca_vlarb_low 0:64,2:128,3:64\n" in tuned["opensm.conf"]


@pytest.mark.parametrize(
    ("ib", "warning"),
    [
        ({}, ""),
        ({"high_limit": 255}, "KV starves"),
        ({"vlarb_high": "0:192,2:64,3:192"}, "served as model traffic is"),
        ({"vlarb_high": "0:192"}, "no priority"),
        ({"vlarb_low": "0:192", "vlarb_high": "2:64,3:64"}, "no guarantee"),
        ({"vlarb_low": "0:64,2:10"}, "uneven"),
    ],
)
def test_weak_arbitration_is_warned_of(ib: dict[str, Any], warning: str) -> None:
    warnings = render(make({"ib": ib}), Fabric.IB).warnings
    assert bool(warnings) == bool(warning)
    assert warning in " ".join(warnings)


@pytest.mark.parametrize(
    ("ib", "field"),
    [
        ({"vlarb_low": "0:192,3:192"}, r"fabric\.ib\.vlarb_low: lane 2 \(kv\)"),
        ({"sl2vl": "0,1,15,3" + ",0" * 12}, r"fabric\.ib\.sl2vl: service level 2 \(kv\)"),
    ],
)
def test_a_class_that_is_never_sent_is_refused(ib: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        opensm.render(make({"ib": ib}).fabric)


# ---- RoCE ---------------------------------------------------------------------------------------


def calls(script: str, tmp_path: Path) -> list[list[str]]:
    """Run a script with an mlnx_qos that writes down its arguments."""
    tool = tmp_path / "mlnx_qos"
    tool.write_text('#!/bin/sh\necho "$@" >> "$0.log"\n')
    tool.chmod(0o755)
    path = tmp_path / "script.sh"
    path.write_text(script)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["sh", str(path), "eth1", "eth2"], env=env, check=True, timeout=30)
    return [line.split() for line in (tmp_path / "mlnx_qos.log").read_text().splitlines()]


def test_roce_script_calls_mlnx_qos_as_it_wants_to_be_called(tmp_path: Path) -> None:
    made = calls(files(make(), Fabric.ROCE)["roce-qos.sh"], tmp_path)
    assert [call[:2] for call in made] == [["-i", "eth1"]] * 4 + [["-i", "eth2"]] * 4
    for call in made:
        # mlnx_qos ends with an error when both stand in one call.
        assert not {"--trust", "--dscp2prio"} <= set(call)
    first = " ".join(word for call in made[:4] for word in call[2:])
    assert first == (
        "--trust dscp --dscp2prio set,26,3 --dscp2prio set,18,2 --pfc 1,1,1,1,0,0,0,0 "
        "--prio_tc 0,1,2,3,4,5,6,7 --tsa ets,ets,ets,ets,strict,strict,strict,strict "
        "--tcbw 33,33,1,33,0,0,0,0"
    )


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.3])
def test_roce_weights_add_up_and_give_kv_its_share(share: float) -> None:
    shares = roce.weights(make({"kv_share": share}).fabric)
    assert sum(shares) == 100 and len(shares) == 8
    assert shares[2] == max(1, round(100 * share)) and shares[3] >= 20
    warned = render(make({"kv_share": share}), Fabric.ROCE).warnings
    assert bool(warned) == (share in (0.001, 0.3))


def test_roce_weights_of_ones_own() -> None:
    config = make({"roce": {"lossless": [3, 5], "kv_priority": 5, "weights": [90, 10]}})
    assert roce.weights(config.fabric) == (0, 0, 0, 90, 0, 10, 0, 0)


# ---- TCP ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last"), [(20480, 20511), (20480, 20513), (1, 65535), (7, 7), (1000, 2001)]
)
def test_port_prefixes_match_the_range_and_nothing_else(first: int, last: int) -> None:
    pairs = port_prefixes(first, last)
    matched = [
        port for port in range(1 << 16) if sum(port & mask == value for value, mask in pairs) == 1
    ]
    assert matched == list(range(first, last + 1))
    assert len(pairs) <= 32


def test_tc_shares_out_the_nodes_own_rate() -> None:
    config = make({"kv_share": 0.02}, rate="400Gbit/s")
    script = files(config, Fabric.TCP)["tc-p.sh"]
    assert "classid 1:10 htb rate 392000000000bit ceil 400000000000bit" in script
    assert "classid 1:20 htb rate 8000000000bit ceil 400000000000bit" in script
    assert "rate 196000000bit" in files(config, Fabric.TCP)["tc-d.sh"]
    by_dscp = files(make({"tcp": {"match": "dscp"}}), Fabric.TCP)["tc-p.sh"]
    assert "match ip dsfield 0x48 0xfc" in by_dscp and "sport" not in by_dscp


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (make(rate="unlimited"), r"nodes\.p\.cnic\.rate"),
        (make({"kv": {}}), r"fabric\.kv\.ports"),
    ],
)
def test_tc_needs_rate_and_ports(config: ClusterConfig, field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        render(config, Fabric.TCP)


# ---- environment --------------------------------------------------------------------------------


def test_libraries_are_told_the_same_marks() -> None:
    config = make()
    node = config.nodes[0]
    assert variables(config, node, Fabric.TCP) == {
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "=cn0",
        "UCX_TCP_PORT_RANGE": "20480-20511",
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "cn0",
    }
    assert variables(config, node, Fabric.IB) == {
        "NCCL_IB_SL": "3",
        "NVSHMEM_IB_SL": "3",
        "EP_OVERRIDE_RDMA_SL": "3",
        "UCX_IB_SL": "2",
    }
    assert variables(config, node, Fabric.ROCE) == {
        "NCCL_IB_TC": "104",
        "NVSHMEM_IB_TRAFFIC_CLASS": "104",
        "UCX_IB_TRAFFIC_CLASS": "72",
    }


def test_a_shell_reads_the_environment_file(tmp_path: Path) -> None:
    path = tmp_path / "qos.env"
    path.write_text(files(make(), Fabric.TCP)["qos-p.env"])
    argv = ["sh", "-c", f'set -a; . "{path}"; echo "$NCCL_SOCKET_IFNAME $UCX_TCP_PORT_RANGE"']
    said = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout
    assert said == "=cn0 20480-20511\n"


# ---- command ------------------------------------------------------------------------------------

CLUSTER = """
[model]
path = "x"
[[nodes]]
name = "p"
role = "prefill"
[[nodes]]
name = "d"
role = "decode"
"""


def test_command_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER)
    words = ["qos", "render", "--config", str(path), "--fabric", "roce", "--json"]
    assert run([*words, "--out", str(tmp_path / "out")]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["files"] == [str(tmp_path / "out" / name) for name in ("roce-qos.sh", "qos.env")]
    assert line["classes"]["p"]["kv"]["traffic_class"] == 72
    assert (tmp_path / "out" / "roce-qos.sh").stat().st_mode & 0o111
    assert run(words) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["files"]["qos.env"] == (tmp_path / "out" / "qos.env").read_text()


def test_command_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(CLUSTER)
    assert run(["qos", "render", "--config", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {path}: nodes.p.cnic.rate: ") and said.count("\n") == 1
    path.write_text(CLUSTER + "[fabric.ib]\nhigh_limit = 255\n")
    assert run(["qos", "render", "--config", str(path), "--fabric", "ib"]) == 0
    assert "255 is unbounded" in capsys.readouterr().err
