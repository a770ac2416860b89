"""The lab's plans: names, addresses, commands, file system descriptions, the cluster file, and what
is made of the kernel's counters."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from lab_kit import model_folder

from dualpath.cli.main import run
from dualpath.config import ConfigError, Mode, Role, dump, parse_rate
from dualpath.lab import glusterfs, inside, links, names
from dualpath.lab.agreement import Flow, Snapshot, agreement
from dualpath.lab.costs import Costs, simulated
from dualpath.lab.counting import ClassBytes, NicBytes, parse_devices
from dualpath.lab.describe import cluster_of
from dualpath.lab.experiments import EXPERIMENTS
from dualpath.lab.names import STORAGE, Host, Net
from dualpath.lab.spec import LabSpec
from dualpath.serve.modes import plan_for
from dualpath.sim import predict

pytestmark = pytest.mark.unit

MB = 10**6
IFNAMSIZ = 16
"""Linux's names of devices have one character less."""


def spec(**changes: object) -> LabSpec:
    return LabSpec(**{"model": "/models/m", "prefill": 2, "decode": 3, **changes})  # type: ignore[arg-type]


def hosts() -> list[Host]:
    return list(names.hosts(spec(prefill=64, decode=64).engines))


def test_every_name_and_address_is_its_own() -> None:
    everyone = hosts()
    assert len({host.namespace for host in everyone}) == len(everyone) == 2 + 128
    addresses = [net.address(host.number) for host in everyone for net in host.nets]
    assert len(set(addresses)) == len(addresses)
    management = ipaddress.ip_network(
        f"{names.MANAGEMENT_HOST}/{names.MANAGEMENT_BITS}", strict=False
    )
    networks = [
        management,
        *(ipaddress.ip_network(f"{net.address(1)}/{names.NET_BITS}", strict=False) for net in Net),
    ]
    assert ipaddress.ip_address(names.FRONT_API_HOST) in management
    for address in addresses:
        assert sum(ipaddress.ip_address(address) in network for network in networks) == 1
    ports = [net.port(host.name) for host in everyone for net in host.nets]
    assert len(set(ports)) == len(ports)
    devices = [*ports, *(net.bridge for net in Net), names.MANAGEMENT_DEVICE]
    assert all(len(device) < IFNAMSIZ for device in devices)


def test_what_outlives_a_process_bears_the_name() -> None:
    commands = [*links.namespaces(hosts()), *links.cables(hosts())]
    made = [command[3] for command in commands if command[:3] == ("ip", "netns", "add")]
    assert len(made) == len(hosts()) + 1
    outside = [command[3] for command in commands if command[:3] == ("ip", "link", "add")]
    assert outside == [names.MANAGEMENT_DEVICE]
    for name in (*made, *outside, names.RUN_DIR.name, names.BRICK_DIR.name):
        assert name.startswith("dualpath-lab")


def test_storage_is_on_one_network_only() -> None:
    by_name = {host.name: host for host in hosts()}
    assert by_name[STORAGE].nets == (Net.STORAGE,)
    assert all(set(host.nets) == set(Net) for host in by_name.values() if host.name != STORAGE)


def test_both_directions_of_every_nic_are_limited() -> None:
    wanted = spec(snic_mbit=30.0, cnic_mbit=200.0)
    everyone = list(names.hosts(wanted.engines))
    commands = list(links.limits(wanted, cluster_of(wanted), everyone))
    limited = Counter()
    for command in commands:
        if "30000000bit" in command:
            limited[command[2], command[6]] += 1
        elif command[4:6] == ("sh", "-c"):
            assert "200000000bit" in command[6] and "198000000bit" in command[6]
            limited[command[3], command[8]] += 1
    switch = names.namespace(names.SWITCH)
    assert set(limited) == {
        place
        for host in everyone
        if host.name != STORAGE
        for net in Net
        for place in ((host.namespace, net.value), (switch, net.port(host.name)))
    }
    assert set(limited.values()) == {1}
    # Without isolation there is one class of the same rate.
    flat = list(links.limits(spec(isolation=False), cluster_of(spec()), everyone))
    assert not any("sh" in command for command in flat)
    assert sum("400000000bit" in command for command in flat) == 2 * (len(everyone) - 1)


def test_a_queue_holds_little_at_any_rate() -> None:
    for mbit in (1.0, 50.0, 400.0):
        wanted = spec(snic_mbit=mbit, isolation=False)
        commands = links.limits(wanted, cluster_of(wanted), list(names.hosts(wanted.engines)))
        queue = next(command for command in commands if "bfifo" in command)
        assert int(queue[-1]) == max(192 << 10, round(mbit * MB / 8 * 0.03))


def test_the_cluster_file_is_what_engines_read() -> None:
    config = cluster_of(
        spec(mode=Mode.SPLIT, cnic_mbit=123.0, tables={"engine": {"max_num_seqs": 3}}), "key"
    )
    assert [node.name for node in config.nodes] == ["pe0", "pe1", "de0", "de1", "de2"]
    assert len(config.engines(Role.PREFILL)) == 2
    assert config.mode is Mode.SPLIT and config.security.admin_key == "key"
    for node in config.nodes:
        assert node.cnic.device == names.CNIC
        assert node.cnic.rate == parse_rate("123Mbit/s")
        assert not node.snic.read.limited  # the kernel's matter
        assert ipaddress.ip_address(node.host) in ipaddress.ip_network("198.18.1.0/24")
    assert config.engine.max_num_seqs == 3
    assert config.engine.kv_cache == 256 << 20, "other fields of the table stay the lab's"
    assert config.front.host == names.FRONT_API_HOST
    assert config.storage.path.startswith(str(names.STORE_DIR))
    assert "198.18.1.2" in dump(config)  # the front's control address


def test_tables_of_the_spec_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs"):
        cluster_of(spec(tables={"engine": {"max_num_seqs": 0}}))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("prefill", 0, "--prefill: 0"),
        ("decode", 65, "--decode: 65"),
        ("snic_mbit", 0.5, "--snic-mbit: 0.5"),
        ("cnic_mbit", 401, "--cnic-mbit: 401"),
    ],
)
def test_bad_specs_are_refused_by_option(field: str, value: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        spec(**{field: value})


def test_without_root_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    for command in (["up"], ["up", "--prefill", "2"], ["down"]):
        assert run(["lab", *command]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "needs root" in line


@pytest.mark.parametrize("command", [["up"], ["run", "smoke"], ["run", "isolation"]])
@pytest.mark.parametrize("option", ["--snic-mbit", "--cnic-mbit"])
@pytest.mark.parametrize("value", ["0", "-5", "nan", "401"])
def test_rates_that_no_nic_has_are_refused(
    command: list[str], option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["lab", *command, f"{option}={value}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{option}: {value} Mbit/s; choose 1 to 400" in line


def test_until_slo_is_for_agents_that_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lab", "run", "smoke", "--until-slo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --until-slo: ")


def test_a_missing_tool_is_named_with_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        shutil,
        "which",
        lambda tool, path=None: None if tool == "glusterfsd" else f"/usr/bin/{tool}",
    )
    assert run(["lab", "up", "--no-engines"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "glusterfsd is not installed" in line and "apt install glusterfs-server" in line


def test_the_file_system_has_locks_and_no_caches() -> None:
    server = glusterfs.server_description("198.18.2.1", names.BRICK_DIR)
    client = glusterfs.client_description("198.18.2.1")
    kinds = [
        line.split()[1] for line in (server + client).splitlines() if line.split()[:1] == ["type"]
    ]
    assert kinds == ["storage/posix", "features/locks", "protocol/server", "protocol/client"]
    assert f"bind-address {glusterfs.storage_address()}\n" in server
    exported = server.split("auth.addr.")[1].split(".allow")[0]
    assert f"remote-subvolume {exported}\n" in client


DEVICES = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo:    5264      24    0    0    0     0          0         0     5264      24    0    0    0
   sn0: 1066000    1000    0    0    0     0          0         0      660      10    0    0    0
"""


def test_kernel_counters_are_read_and_headers_taken_off() -> None:
    found = parse_devices(DEVICES)
    assert set(found) == {"lo", "sn0"}
    assert found["sn0"] == NicBytes(1_066_000, 1000, 660, 10)
    assert (found["sn0"].rx_payload_bytes, found["sn0"].tx_payload_bytes) == (1_000_000, 0)
    assert found["sn0"].since(found["lo"]) == NicBytes(1_060_736, 976, -4604, -14)
    assert ClassBytes(1566, 1).payload_bytes == 1500


def totals(read: int, sent: int, loopback: int, metric: int) -> Snapshot:
    return Snapshot(
        {"pe0": {"sn0": NicBytes(rx_bytes=read), "lo": NicBytes(tx_bytes=loopback)}},
        {"pe0": {"kv": ClassBytes(sent), "model": ClassBytes()}},
        {"pe0": {"storage_read_bytes": metric, "agent_write_bytes": metric}},
    )


def test_bytes_that_took_another_way_are_seen() -> None:
    nothing = totals(0, 0, 0, 0)

    def of(after: Snapshot) -> tuple[bool, dict[Flow, bool]]:
        found = agreement(nothing, after)
        return found.agrees, {line.flow: line.agrees for line in found.lines}

    fine = {Flow.READ: True, Flow.WRITTEN: True, Flow.KV: True}
    assert of(totals(101 * MB, 99 * MB, 0, 100 * MB)) == (True, fine)
    # Out of a cache; from memory to memory; over loopback.
    assert of(totals(50 * MB, 100 * MB, 0, 100 * MB)) == (False, {**fine, Flow.READ: False})
    assert of(totals(100 * MB, 0, 0, 100 * MB)) == (False, {**fine, Flow.KV: False})
    assert of(totals(100 * MB, 100 * MB, 100 * MB, 100 * MB)) == (False, fine)
    # The kernel counts what we do not know of.
    assert of(totals(50 * MB, 0, 0, 0))[1] == {**fine, Flow.READ: False}
    # What the file system asks for a thousand blocks is not taken for a write.
    asked = glusterfs.asked_bytes(1000, 256 * MB)
    assert asked > MB
    reading = totals(256 * MB, 256 * MB, 0, 256 * MB)
    reading.nics["pe0"]["sn0"] = NicBytes(rx_bytes=256 * MB, tx_bytes=10 * asked)
    assert not of(reading)[1][Flow.WRITTEN]
    reading.nics["pe0"]["sn0"] = NicBytes(rx_bytes=256 * MB, tx_bytes=5 * MB + asked)
    reading.engines["pe0"] |= {"storage_read_blocks_ok": 1000, "storage_write_bytes": 5 * MB}
    assert of(reading) == (True, fine)
    # Without isolation the compute network's bytes are not told apart.
    one_class = dataclasses.replace(totals(100 * MB, 0, 0, 100 * MB), classes={"pe0": {}})
    assert of(one_class) == (True, {Flow.READ: True, Flow.WRITTEN: True})
    # Too little to tell.
    assert of(totals(MB, 0, MB, 0)) == (True, fine)


# ---- the ablation --------------------------------------------------------------------------------


def test_each_step_of_the_ablation_adds_what_it_says(tmp_path: Path) -> None:
    """By the scheduler itself, in the simulator: who reads, and how evenly."""
    (case,) = EXPERIMENTS["ablation"].cases
    lab = LabSpec(model_folder(tmp_path), prefill=case.prefill, decode=case.decode)
    config = cluster_of(lab)
    costs = Costs(prefill_tokens_per_s=5e3, decode_step_s=0.01, decode_step_per_request_s=0.002,
                  decode_start_s=0.02, request_overhead_s=0.05, context_tokens=1536)  # fmt: skip
    measured = costs.measured({node.name: 5.6e6 for node in config.nodes}, 48e6)
    found = {
        one.name: predict(config, measured, simulated(case.shape), mode=one.mode,
                          policy=one.policy, agents=case.shape.agents)
        for one in case.variants
    }  # fmt: skip
    assert list(found) == ["basic", "layerwise", "alternating", "dualpath"]
    read = {name: one.to_json()["snic"] for name, one in found.items()}
    whole = sum(read["basic"].values())
    for name in ("basic", "layerwise"):
        assert read[name] == {"pe0": whole, "de0": 0, "de1": 0}
    # Every second request by its decode node, and every decode node in turn.
    for node, share in (("pe0", 1 / 2), ("de0", 1 / 4), ("de1", 1 / 4)):
        assert read["alternating"][node] == pytest.approx(share * whole, rel=0.15)
    assert found["alternating"].snic_max_over_mean == pytest.approx(1.5, rel=0.1)
    assert found["dualpath"].snic_max_over_mean < 1.1
    jct_s = [one.jct.mean for one in found.values()]
    assert jct_s[1] <= jct_s[0] and jct_s[2] < 0.6 * jct_s[1] and jct_s[3] < 0.9 * jct_s[2]
    # What a mode means for a request: only basic moves a prompt's KV in one piece.
    layerwise = {one.name: plan_for(one.mode, config).layerwise for one in case.variants}
    assert layerwise == {"basic": False, "layerwise": True, "alternating": True, "dualpath": True}


# ---- signals -------------------------------------------------------------------------------------


def test_a_signal_reaches_only_the_process_that_is_meant() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not inside.send(process.pid, signal.SIGKILL, lambda: False)
            assert process.poll() is None
            assert inside.send(process.pid, signal.SIGKILL, lambda: True)
            assert process.wait(10) == -signal.SIGKILL
        finally:
            process.kill()
    assert not inside.send(process.pid, signal.SIGKILL, lambda: True)  # gone
