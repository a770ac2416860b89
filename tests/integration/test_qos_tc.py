"""tc's classes in the kernel: two network namespaces, a link of 100 Mbit/s, KV by real NIXL agents
and model traffic by plain TCP."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")

from qos_traffic import CLUSTER_FILE, DEVICE

from dualpath.config import load
from dualpath.fabric import Fabric
from dualpath.transfer.qos.check import Report, check
from dualpath.transfer.qos.render import render
from dualpath.transfer.qos.verdict import Verdict

pytestmark = [pytest.mark.integration, pytest.mark.root, pytest.mark.timeout(120)]

PREFIX = "dualpath-qos-"
RATE_BYTES_S = 100e6 / 8
WATCH_S = 2.0
WINDOWS = 5
SETTLE_S = 1.0
CARRIER_S = 10.0
SOURCE_HOST, TARGET_HOST = "10.213.0.1", "10.213.0.2"
CLUSTER = f"""
[model]
path = "model"
[fabric.kv]
ports = "20480-20513"
[[nodes]]
name = "p"
role = "prefill"
host = "{SOURCE_HOST}"
cnic = {{ device = "{DEVICE}", rate = "100Mbit/s" }}
[[nodes]]
name = "d"
role = "decode"
host = "{TARGET_HOST}"
cnic = {{ device = "{DEVICE}", rate = "100Mbit/s" }}
"""


def sh(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    assert not check or done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
    return done.stdout


def remove_leftovers() -> None:
    """Namespaces of runs that were killed: their name has the process that made them."""
    for line in sh("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            sh("ip", "netns", "del", name, check=False)


def await_carrier(namespace: str) -> None:
    """The kernel may tell a new cable's carrier a second late, and UCX takes no device without."""
    deadline_s = time.monotonic() + CARRIER_S
    while "state UP" not in sh("ip", "-n", namespace, "link", "show", DEVICE):
        assert time.monotonic() < deadline_s, f"{namespace}: no carrier"
        time.sleep(0.02)


@dataclass
class Link:
    """Two namespaces with a cable between them."""

    folder: Path
    source: str
    target: str

    def python(self, where: str, *argv: str, **options: Any) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", where, sys.executable, *argv]
        return subprocess.Popen(command, text=True, stdin=subprocess.PIPE, **options)

    @property
    def sysfs(self) -> Path:
        return Path("/sys")

    def run(self, argv: Sequence[str]) -> str:
        """The product's view of the source's machine."""
        return sh("ip", "netns", "exec", self.source, *argv)

    def cli(self, *argv: str) -> tuple[int, dict[str, Any], str]:
        """``dualpath qos`` where the source is: status, its JSON line, what it said."""
        config = str(self.folder / CLUSTER_FILE)
        # Without the other commands, whose imports take longer than all else here.
        program = "from dualpath.cli.qos import qos_app; qos_app()"
        words = ["-c", program, argv[0], "--config", config, "--json", *argv[1:]]
        running = self.python(self.source, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, said = running.communicate(timeout=60)
        lines = out.splitlines()
        return running.returncode, json.loads(lines[-1]) if lines else {}, said

    def check(self, interval_s: float = 0) -> Report:
        config = load(self.folder / CLUSTER_FILE)
        return check(config, config.nodes[:1], Fabric.TCP, self, interval_s)

    def verdicts(self) -> dict[str, Verdict]:
        return {found.what: found.verdict for found in self.check().checks}

    def write(self, cluster: str) -> None:
        """The cluster file, and the scripts that belong to it."""
        path = self.folder / CLUSTER_FILE
        path.write_text(cluster)
        for file in render(load(path), Fabric.TCP).files:
            (self.folder / file.name).write_text(file.text)

    def configure(self, *argv: str) -> None:
        sh("ip", "netns", "exec", self.source, "sh", str(self.folder / "tc-p.sh"), *argv)

    def watch(self) -> tuple[float, float]:
        """Parts of the link that the model's class and KV's take, once traffic has settled."""
        report = self.check(WATCH_S)
        assert report.verdict is Verdict.IN_FORCE, report
        (counted,) = report.counted
        whole = RATE_BYTES_S * counted.seconds
        return counted.model_bytes / whole, counted.kv_bytes / whole

    def settles(self, wanted: Callable[[float, float], bool]) -> None:
        """Watch until the parts are as ``wanted``: a sender that gets no core for a while leaves
        the link to others, which is not what is tested."""
        time.sleep(SETTLE_S)
        seen = []
        for _ in range(WINDOWS):
            seen.append(self.watch())
            if wanted(*seen[-1]):
                return
        raise AssertionError(f"model and KV took {seen}")


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs iproute2")
    remove_leftovers()
    source, target = f"{PREFIX}{os.getpid()}-a", f"{PREFIX}{os.getpid()}-b"
    try:
        for name in (source, target):
            sh("ip", "netns", "add", name)
        sh(
            "ip", "-n", source, "link", "add", DEVICE, "type", "veth",
            "peer", "name", DEVICE, "netns", target,
        )  # fmt: skip
        for name, host in ((source, SOURCE_HOST), (target, TARGET_HOST)):
            sh("ip", "-n", name, "addr", "add", f"{host}/24", "dev", DEVICE)
            sh("ip", "-n", name, "link", "set", DEVICE, "up")
            sh("ip", "-n", name, "link", "set", "lo", "up")
        for name in (source, target):
            await_carrier(name)
        made = Link(tmp_path, source, target)
        made.write(CLUSTER)
        yield made
    finally:
        for name in (source, target):
            sh("ip", "netns", "del", name, check=False)


@dataclass
class Traffic:
    """The sending end."""

    process: subprocess.Popen[str]

    def tell(self, what: str) -> dict[str, int]:
        """Switch something; bytes sent so far."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        for answer in self.process.stdout:
            if answer.startswith("{"):  # NIXL logs on standard output
                counts: dict[str, int] = json.loads(answer)
                return counts
        raise AssertionError("the source ended")


@pytest.fixture
def traffic(link: Link) -> Iterator[Traffic]:
    script = str(Path(__file__).with_name("qos_traffic.py"))
    target = link.python(link.target, script, "target", str(link.folder), TARGET_HOST)
    source = link.python(
        link.source, script, "source", str(link.folder), TARGET_HOST, stdout=subprocess.PIPE
    )
    try:
        yield Traffic(source)
    finally:
        for process in (source, target):
            process.kill()
            process.wait(10)


def test_the_kernel_shares_the_link_as_promised(link: Link, traffic: Traffic) -> None:
    assert link.check().verdict is Verdict.NOT_IN_FORCE

    link.configure()
    begun = traffic.tell("kv on")
    # KV alone has the link, and what the class counts is what the transfers carry.
    link.settles(lambda model, kv: kv >= 0.90 and model < 0.01)
    moved = traffic.tell("model on")
    assert moved["kv"] - begun["kv"] >= 0.85 * RATE_BYTES_S * WATCH_S

    link.settles(lambda model, kv: model >= 0.95 and 0 < kv < 0.05)

    # It is the rules that do it: without them KV takes its part as any connection does.
    sh("tc", "-n", link.source, "filter", "del", "dev", DEVICE)
    parts = []
    while not parts or (parts[-1] < 0.15 and len(parts) < WINDOWS):
        begun, begun_s = traffic.tell("model on"), time.monotonic()
        time.sleep(WATCH_S)
        moved, seconds = traffic.tell("model on"), time.monotonic() - begun_s
        parts.append((moved["kv"] - begun["kv"]) / seconds / RATE_BYTES_S)
    assert parts[-1] >= 0.15, parts


def test_the_command_tells_whether_it_is_so(link: Link) -> None:
    link.configure()
    status, line, said = link.cli("check", "--interval", "100ms")
    assert (status, line["verdict"]) == (0, "in force"), said
    assert [counted["where"] for counted in line["counted"]] == [f"p {DEVICE}"]
    # Without its rules KV is in the model's class.
    sh("tc", "-n", link.source, "filter", "del", "dev", DEVICE)
    status, line, _ = link.cli("check", "--interval", "0s")
    assert (status, [check["what"] for check in line["checks"]]) == (1, ["filters"])
    assert "same class" in line["checks"][0]["text"]


def test_each_thing_out_of_order_is_named(link: Link) -> None:
    link.configure()
    fine = dict.fromkeys(("filters", "priority", "rates"), Verdict.IN_FORCE)
    assert link.verdicts() == fine
    link.write(CLUSTER.replace(SOURCE_HOST, "fd00::1"))  # both IP versions
    assert link.verdicts() == fine
    tc = ("tc", "-n", link.source)
    child = ("class", "change", "dev", DEVICE, "parent", "1:1", "classid")
    sh(*tc, *child, "1:20", "htb", "rate", "1mbit", "ceil", "50mbit", "prio", "1")
    assert link.verdicts() == {**fine, "rates": Verdict.NOT_IN_FORCE}
    sh(*tc, *child, "1:20", "htb", "rate", "1mbit", "ceil", "100mbit", "prio", "0")
    assert link.verdicts() == {**fine, "priority": Verdict.NOT_IN_FORCE}
    # A range of 34 ports takes two rules for each end and each IP version: one IPv4 rule less.
    link.configure()
    assert link.verdicts() == fine
    rules = sh(*tc, "filter", "show", "dev", DEVICE).splitlines()
    handles = [line.split(" fh ")[1].split()[0] for line in rules if "flowid" in line]
    assert len(handles) == 8
    rule = ("parent", "1:", "protocol", "ip", "prio", "1", "handle", handles[3], "u32")
    sh(*tc, "filter", "del", "dev", DEVICE, *rule)
    assert link.verdicts() == {"filters": Verdict.NOT_IN_FORCE}
    link.configure(DEVICE, "clear")
    assert link.verdicts() == {"classes": Verdict.NOT_IN_FORCE}


def test_kv_may_be_told_by_its_dscp(link: Link) -> None:
    link.write(CLUSTER + '[fabric.tcp]\nmatch = "dscp"\n')
    link.configure()
    assert set(link.verdicts().values()) == {Verdict.IN_FORCE}
    six = CLUSTER.replace(SOURCE_HOST, "fd00::1").replace(TARGET_HOST, "fd00::2")
    link.write(six + '[fabric.tcp]\nmatch = "dscp"\n')
    assert set(link.verdicts().values()) == {Verdict.IN_FORCE}
    # What tells it by its ports is then not good enough.
    link.write(CLUSTER)
    assert link.verdicts() == {"filters": Verdict.NOT_IN_FORCE}
