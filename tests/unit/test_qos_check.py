"""Checks on recorded texts and made-up sysfs: each fabric in force, each thing amiss, and nothing
to be told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import qos_texts as texts

from dualpath.cli.main import run
from dualpath.config import ClusterConfig, dump, parse
from dualpath.doctor import Level
from dualpath.doctor.fabric import check_classes
from dualpath.fabric import Fabric
from dualpath.transfer.qos.check import Report, check
from dualpath.transfer.qos.ib_state import parse_port
from dualpath.transfer.qos.roce_state import parse_interface
from dualpath.transfer.qos.system import ThisMachine, ToolFailed, ToolMissing
from dualpath.transfer.qos.tc_state import (
    TcState,
    ipv4_header,
    parse_classes,
    parse_default,
    parse_filters,
    parse_rate,
)
from dualpath.transfer.qos.verdict import Check, Verdict, overall

pytestmark = pytest.mark.unit

Answers = dict[str, list[str] | str]


class Recorded:
    """A machine that says what was recorded: by the beginning of a command, one text, or several
    in turn."""

    def __init__(self, sysfs: Path, answers: Answers) -> None:
        self.sysfs = sysfs
        self.answers = {head: [text] if isinstance(text, str) else list(text)
                        for head, text in answers.items()}  # fmt: skip

    def run(self, argv: Sequence[str]) -> str:
        command = " ".join(argv)
        for head, said in self.answers.items():
            if command.startswith(head):
                text = said.pop(0) if len(said) > 1 else said[0]
                if text.startswith("FAILED"):
                    raise ToolFailed(text)
                return text
        raise ToolMissing(f"{argv[0]} is not installed")


def make(device: str = "cn0", fabric: dict[str, object] | None = None) -> ClusterConfig:
    cnic = {"device": device, "rate": "200Mbit/s"}
    return parse(
        {
            "model": {"path": "x"},
            "nodes": [
                {"name": "p", "role": "prefill", "cnic": cnic},
                {"name": "d", "role": "decode"},
            ],
            "fabric": {"kv": {"ports": "20480-20511"}, **(fabric or {})},
        }
    )


def look(
    config: ClusterConfig, fabric: Fabric, system: Recorded, interval_s: float = 0.001
) -> Report:
    return check(config, config.nodes[:1], fabric, system, interval_s)


def amiss(report: Report) -> list[str]:
    return [found.what for found in report.checks if found.verdict is Verdict.NOT_IN_FORCE]


def rdma(sysfs: Path, link_layer: str, interface: str = "") -> Path:
    device = sysfs / "class" / "infiniband" / "mlx5_0"
    port = device / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{link_layer}\n")
    (port / "lid").write_text("0x2\n")
    if interface:
        (device / "device" / "net" / interface).mkdir(parents=True)
    return device


# ---- the verdict --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verdicts", "whole"),
    [
        ([], Verdict.UNKNOWN),
        ([Verdict.IN_FORCE], Verdict.IN_FORCE),
        ([Verdict.IN_FORCE, Verdict.UNKNOWN], Verdict.UNKNOWN),
        ([Verdict.UNKNOWN, Verdict.NOT_IN_FORCE, Verdict.IN_FORCE], Verdict.NOT_IN_FORCE),
    ],
)
def test_in_force_only_if_everything_is(verdicts: list[Verdict], whole: Verdict) -> None:
    assert overall(Check("w", "x", verdict, "") for verdict in verdicts) is whole


# ---- TCP ----------------------------------------------------------------------------------------


def tc_machine(**changed: str | list[str]) -> Recorded:
    answers: Answers = {
        "tc -j qdisc": texts.TC_QDISC,
        "tc -s class": texts.TC_CLASSES,
        "tc filter": texts.TC_FILTERS,
    }
    renamed = {"qdisc": "tc -j qdisc", "classes": "tc -s class", "filters": "tc filter"}
    return Recorded(Path("/none"), answers | {renamed[key]: text for key, text in changed.items()})


def test_tc_in_force_with_what_each_class_sent() -> None:
    later = texts.TC_CLASSES.replace("Sent 123456", "Sent 223456").replace("Sent 7000", "Sent 7500")
    report = look(make(), Fabric.TCP, tc_machine(classes=[texts.TC_CLASSES] * 2 + [later]))
    assert report.verdict is Verdict.IN_FORCE and len(report.checks) == 3
    (counted,) = report.counted
    assert (counted.where, counted.model_bytes, counted.kv_bytes) == ("p cn0", 100_000, 500)
    assert look(make(), Fabric.TCP, tc_machine(), interval_s=0).counted == ()


@pytest.mark.parametrize("later", ["FAILED: no such device", ""])
def test_counters_that_go_while_they_are_watched(
    later: str, caplog: pytest.LogCaptureFixture
) -> None:
    report = look(make(), Fabric.TCP, tc_machine(classes=[texts.TC_CLASSES] * 2 + [later]))
    assert (report.verdict, report.counted) == (Verdict.IN_FORCE, ())
    assert "p cn0: counters by class cannot be read: " in caplog.text


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"qdisc": texts.TC_QDISC_NONE}, "classes"),
        ({"qdisc": "[]"}, "classes"),
        ({"filters": ""}, "filters"),
        # KV's ports as source only: what peers' listeners are sent is in the model's class.
        ({"filters": texts.TC_FILTERS.replace("/0000ffe0", "/0000ffff")}, "filters"),
        # Only half of the ports.
        ({"filters": texts.TC_FILTERS.replace("ffe0", "fff0")}, "filters"),
        # UDP.
        ({"filters": texts.TC_FILTERS.replace("00060000", "00110000")}, "filters"),
        # All of TCP.
        ({"filters": texts.TC_FILTERS.replace("5000", "0000").replace("ffe0", "0000")}, "filters"),
        ({"filters": texts.TC_FILTERS.replace("flowid 1:20", "flowid 1:30")}, "classes"),
        ({"classes": texts.TC_CLASSES.replace("prio 1 ", "prio 0 ")}, "priority"),
        ({"classes": texts.TC_CLASSES.replace("rate 2Mbit", "rate 20Mbit")}, "rates"),
        ({"classes": texts.TC_CLASSES.replace("2Mbit ceil 200Mbit", "2Mbit ceil 2Mbit")}, "rates"),
        ({"classes": texts.TC_CLASSES.replace("1:20 parent 1:1 ", "1:20 parent 1:2 ")}, "rates"),
        ({"classes": texts.TC_CLASSES.replace("root rate 200Mbit", "root rate 1Gbit")}, "rates"),
    ],
)  # fmt: skip
def test_tc_amiss(changed: dict[str, str], what: str) -> None:
    report = look(make(), Fabric.TCP, tc_machine(**changed))
    assert (report.verdict, amiss(report)) == (Verdict.NOT_IN_FORCE, [what])
    assert all(found.todo for found in report.checks if found.verdict is Verdict.NOT_IN_FORCE)


def test_the_doctor_says_the_same() -> None:
    config = make()
    (fine,) = check_classes(tc_machine(), config.nodes[:1], config)
    assert (fine.level, fine.text) == (Level.OK, "in force on p cn0")
    amiss_machine = tc_machine(filters="")
    (bad,) = check_classes(amiss_machine, config.nodes[:1], config)
    assert (bad.level, "same class" in bad.text) == (Level.WARN, True)
    assert "tc-p.sh" in bad.todo


def test_tc_by_dscp() -> None:
    config = make(fabric={"tcp": {"match": "dscp"}})
    assert look(config, Fabric.TCP, tc_machine(filters=texts.TC_DSCP_FILTERS)).verdict is (
        Verdict.IN_FORCE
    )
    assert amiss(look(config, Fabric.TCP, tc_machine())) == ["filters"]


def test_tc_over_ipv6() -> None:
    config = make()
    hosts = [msgspec.structs.replace(node, host="fd00::1") for node in config.nodes]
    six = msgspec.structs.replace(config, nodes=tuple(hosts))
    # The recorded rules know the ports as source only.
    assert amiss(look(six, Fabric.TCP, tc_machine())) == ["filters"]
    rule = texts.TC_FILTERS[texts.TC_FILTERS.rindex("filter ") :]
    other_end = rule.replace("801::800 order 2048", "801::801 order 2049")
    other_end = other_end.replace("50000000/ffe00000", "00005000/0000ffe0")
    both = tc_machine(filters=texts.TC_FILTERS + other_end)
    assert look(six, Fabric.TCP, both).verdict is Verdict.IN_FORCE
    mixed = msgspec.structs.replace(config, nodes=(hosts[0], config.nodes[1]))
    assert amiss(look(mixed, Fabric.TCP, tc_machine())) == ["filters"]


def test_tc_cannot_tell() -> None:
    assert look(make(), Fabric.TCP, Recorded(Path("/none"), {})).verdict is Verdict.UNKNOWN
    refused = tc_machine(qdisc='FAILED: Cannot find device "cn0"')
    report = look(make(), Fabric.TCP, refused)
    assert report.verdict is Verdict.UNKNOWN and "Cannot find device" in report.checks[0].text
    assert look(make(device=""), Fabric.TCP, tc_machine()).verdict is Verdict.UNKNOWN
    assert check(make(), [], Fabric.TCP, tc_machine(), 0).verdict is Verdict.UNKNOWN


def test_tc_texts_are_understood() -> None:
    classes = parse_classes(texts.TC_CLASSES)
    assert set(classes) == {"1:1", "1:10", "1:20"}
    assert classes["1:10"].rate_bits_s == 198e6 and classes["1:1"].parent == ""
    filters = parse_filters(texts.TC_FILTERS)
    assert [(rule.protocol, len(rule.keys)) for rule in filters] == [
        ("ip", 2),
        ("ip", 2),
        ("ipv6", 2),
    ]
    assert parse_default(texts.TC_QDISC) == "1:10"
    state = TcState("1:10", classes, filters)
    ports = [20479, 20480, 20511, 20512]
    assert [state.classify(ipv4_header(port, 1)) for port in ports] == (
        ["1:10", "1:20", "1:20", "1:10"]
    )
    assert parse_rate("1500Kbit") == 1.5e6 and parse_rate("25Gbit") == 25e9
    with pytest.raises(ValueError, match="not understood"):
        parse_rate("1 apple")


# ---- InfiniBand ---------------------------------------------------------------------------------


def ib_machine(tmp_path: Path, **changed: str | list[str]) -> Recorded:
    sysfs = tmp_path / "sys"
    rdma(sysfs, "InfiniBand")
    ask = "smpquery -C mlx5_0 -P 1 -D"
    texts_of = {
        "portinfo": texts.PORT_INFO, "sl2vl": texts.SL2VL, "vlarb": texts.VLARB, **changed,
    }  # fmt: skip
    counters = texts_of.pop("xmtsl", "FAILED: cannot query PortXmitDataSL")
    answers: Answers = {f"{ask} {what} 0 1": text for what, text in texts_of.items()}
    return Recorded(sysfs, {**answers, "perfquery -C mlx5_0 -P 1 --xmtsl 2 1": counters})


def test_ib_in_force_with_what_each_level_sent(tmp_path: Path) -> None:
    counters = [texts.XMT_SL.format(model=1000, kv=10), texts.XMT_SL.format(model=1500, kv=20)]
    machine = ib_machine(tmp_path, xmtsl=counters)
    report = look(make("mlx5_0:1"), Fabric.IB, machine)
    assert report.verdict is Verdict.IN_FORCE and len(report.checks) == 5
    (counted,) = report.counted
    # Counters count words of four bytes.
    assert (counted.where, counted.model_bytes, counted.kv_bytes) == ("p mlx5_0:1", 2000, 40)


def test_ib_without_counters_by_level(tmp_path: Path) -> None:
    report = look(make(""), Fabric.IB, ib_machine(tmp_path))
    assert (report.verdict, report.counted) == (Verdict.IN_FORCE, ())


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"portinfo": texts.PORT_INFO.replace("VL0-3", "VL0-1")}, ["lanes in operation"]),
        ({"portinfo": texts.PORT_INFO.replace("VL0-3", "VL0")}, ["lanes in operation"]),
        ({"portinfo": texts.PORT_INFO.replace(".240", ".255")}, ["high limit"]),
        ({"sl2vl": texts.SL2VL.replace("| 0| 1| 2| 3| 0|", "| 0| 1| 0| 1| 0|")}, ["sl2vl"]),
        ({"vlarb": texts.VLARB.replace("0x40", "0x80")}, ["low table"]),
        ({"vlarb": texts.VLARB_OPENSM_DEFAULT}, ["high table", "low table"]),
    ],
)
def test_ib_amiss(tmp_path: Path, changed: dict[str, str], what: list[str]) -> None:
    report = look(make(""), Fabric.IB, ib_machine(tmp_path, **changed))
    assert (report.verdict, amiss(report)) == (Verdict.NOT_IN_FORCE, what)


def test_ib_cannot_tell(tmp_path: Path) -> None:
    config = make("")
    assert look(config, Fabric.IB, Recorded(tmp_path, {})).verdict is Verdict.UNKNOWN
    no_tools = Recorded(ib_machine(tmp_path).sysfs, {})
    report = look(config, Fabric.IB, no_tools)
    assert (
        report.verdict is Verdict.UNKNOWN and "smpquery is not installed" in report.checks[0].text
    )
    # A port that the node does not use says nothing about it.
    assert look(make("mlx5_1:1"), Fabric.IB, ib_machine(tmp_path / "other")).verdict is (
        Verdict.UNKNOWN
    )
    garbled = look(config, Fabric.IB, ib_machine(tmp_path / "garbled", sl2vl="# SL2VL table"))
    assert garbled.verdict is Verdict.UNKNOWN


def test_long_arbitration_tables_come_in_two_parts() -> None:
    part = "VL    : |0x2 |0x3 |\nWEIGHT: |0x40|0xC0|\n"
    vlarb = (
        "# VLArbitration tables: Lid 2 port 1 LowCap 64 HighCap 64\n"
        f"# Low priority VL Arbitration Table:\n{part}{part}"
        f"# High priority VL Arbitration Table:\n{part}"
    )
    state = parse_port(texts.PORT_INFO, texts.SL2VL, vlarb)
    assert (state.low, state.high) == ({2: 128, 3: 384}, {2: 64, 3: 192})


# ---- RoCE ---------------------------------------------------------------------------------------


def roce_machine(tmp_path: Path, qos: str = texts.MLNX_QOS, **more: str | list[str]) -> Recorded:
    sysfs = tmp_path / "sys"
    rdma(sysfs, "Ethernet", "eth7")
    answers: Answers = {"mlnx_qos -i eth7": qos}
    return Recorded(sysfs, answers | {f"{tool} -S eth7": text for tool, text in more.items()})


def test_roce_in_force_with_what_each_priority_sent(tmp_path: Path) -> None:
    counters = [texts.ETHTOOL.format(model=5, kv=1), texts.ETHTOOL.format(model=905, kv=11)]
    report = look(make("mlx5_0:1"), Fabric.ROCE, roce_machine(tmp_path, ethtool=counters))
    assert report.verdict is Verdict.IN_FORCE and len(report.checks) == 5
    (counted,) = report.counted
    assert (counted.where, counted.model_bytes, counted.kv_bytes) == ("p eth7", 900, 10)


@pytest.mark.parametrize(
    ("qos", "what"),
    [
        (texts.MLNX_QOS.replace("state: dscp", "state: pcp"), ["trust"]),
        (texts.MLNX_QOS.replace("19,18,17", "19,17"), ["priority of DSCP"]),
        (texts.MLNX_QOS.replace("enabled     1   1   1   1", "enabled     0   0   1   1"), ["PFC"]),
        (texts.MLNX_QOS.replace("bw: 1%", "bw: 34%"), ["weights"]),
        (
            texts.MLNX_QOS.replace("tc: 2 ratelimit: unlimited, tsa: ets, bw: 1%\n", ""),
            ["class of priority", "weights"],
        ),
        (
            texts.MLNX_QOS_FACTORY,
            ["trust", "priority of DSCP", "PFC", "class of priority", "weights"],
        ),
    ],
)  # fmt: skip
def test_roce_amiss(tmp_path: Path, qos: str, what: list[str]) -> None:
    report = look(make(""), Fabric.ROCE, roce_machine(tmp_path, qos))
    assert (report.verdict, amiss(report)) == (Verdict.NOT_IN_FORCE, what)


def test_a_device_that_marks_everything_alike_is_told(tmp_path: Path) -> None:
    machine = roce_machine(tmp_path)
    folder = machine.sysfs / "class" / "infiniband" / "mlx5_0" / "tc" / "1"
    folder.mkdir(parents=True)
    (folder / "traffic_class").write_text("Global tclass=106\n")
    report = look(make(""), Fabric.ROCE, machine)
    assert amiss(report) == ["traffic class"] and "106" in report.checks[0].text


def test_roce_cannot_tell(tmp_path: Path) -> None:
    assert look(make(""), Fabric.ROCE, Recorded(tmp_path, {})).verdict is Verdict.UNKNOWN
    machine = Recorded(roce_machine(tmp_path).sysfs, {})
    assert look(make(""), Fabric.ROCE, machine).verdict is Verdict.UNKNOWN
    # InfiniBand ports are no RoCE ports.
    rdma(tmp_path / "ib", "InfiniBand")
    assert look(make(""), Fabric.ROCE, Recorded(tmp_path / "ib", {})).verdict is Verdict.UNKNOWN
    with pytest.raises(ValueError, match="mlnx_qos shows no trust state"):
        parse_interface("Permission denied")


# ---- the machine and the command ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "error", "said"),
    [
        (["no-such-tool-of-ours"], ToolMissing, "is not installed"),
        (["sh", "-c", "echo no >&2; exit 4"], ToolFailed, "sh: no"),
        (["sh", "-c", "exit 4"], ToolFailed, "sh: status 4"),
    ],
)
def test_tools_that_are_missing_or_refuse(
    argv: list[str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ThisMachine().run(argv)


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--fabric", "ib"], 3),
        (["--fabric", "roce", "--node", "p"], 3),
        (["--fabric", "ib", "--node", "nowhere"], 2),
        (["--fabric", "ib", "--interval", "5"], 2),
    ],
)
def test_command_tells_by_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(dump(make()))
    words = ["qos", "check", "--config", str(path), "--sysfs", str(tmp_path), "--json", *words]
    assert run(words) == status
    said = capsys.readouterr()
    if status == 2:
        assert said.err.startswith("error: ") and said.err.count("\n") == 1 and not said.out
    else:
        line = json.loads(said.out.splitlines()[-1])
        assert (line["verdict"], line["in_force"]) == ("cannot tell", False)
        assert "it cannot be told" in said.err
