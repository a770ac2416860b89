"""opensm reads our file and programs a subnet with it; the check reads it back with smpquery.

The subnet is simulated by ibsim: everything but the hardware is what runs in a cluster. Needs
Debian's ibsim-utils, libumad2sim0, opensm and infiniband-diags.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dualpath.config import ClusterConfig, parse
from dualpath.fabric import Fabric
from dualpath.transfer.qos.check import check
from dualpath.transfer.qos.render import render
from dualpath.transfer.qos.system import ToolFailed
from dualpath.transfer.qos.verdict import Verdict

pytestmark = pytest.mark.integration

NETWORK = """\
Switch 4 "Switch"
[1] "HostA"[1]
[2] "HostB"[1]

Hca 1 "HostA"
[1] "Switch"[1]

Hca 1 "HostB"
[1] "Switch"[2]
"""
START_S = 20.0
TOOLS = ("ibsim", "opensm", "smpquery", "perfquery")


def preload() -> Path | None:
    """The library through which tools reach the simulator."""
    folders = [*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib/x86_64-linux-gnu"]
    found = [Path(folder) / "umad2sim" / "libumad2sim.so" for folder in folders if folder]
    return next((path for path in found if path.exists()), None)


@dataclass
class Subnet:
    """A simulated subnet, seen from one of its hosts."""

    folder: Path
    sysfs: Path
    env: dict[str, str]

    def run(self, argv: Sequence[str]) -> str:
        """A tool where the simulator gives its one adapter another name than our sysfs does."""
        plain = [word for word in argv if word not in ("-C", "-P", "mlx5_0")]
        if plain[1] == "1":  # what stood behind -P
            del plain[1]
        done = subprocess.run(
            plain, env=self.env, capture_output=True, text=True, timeout=30, check=False
        )
        if done.returncode:
            raise ToolFailed(done.stderr)  # ibsim has no counters by service level
        return done.stdout

    def configure(self, config: ClusterConfig) -> str:
        """Let opensm sweep once with our file; what it wrote about it."""
        (text,) = [f.text for f in render(config, Fabric.IB).files if f.name == "opensm.conf"]
        (self.folder / "opensm.conf").write_text(text)
        argv = ["opensm", "-o", "-F", "opensm.conf", "-f", "opensm.log", "-D", "0xff"]
        done = subprocess.run(
            argv, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60,
            check=True,
        )  # fmt: skip
        return done.stdout + (self.folder / "opensm.log").read_text(errors="replace")


@pytest.fixture
def subnet(tmp_path: Path) -> Iterator[Subnet]:
    os_path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    library = preload()
    if library is None or not all(shutil.which(tool, path=os_path) for tool in TOOLS):
        pytest.skip("needs ibsim, libumad2sim, opensm and infiniband-diags")
    (tmp_path / "net").write_text(NETWORK)
    port = tmp_path / "sys" / "class" / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "lid").write_text("0x1\n")
    env = {**os.environ, "PATH": os_path, "OSM_TMP_DIR": str(tmp_path)}
    with (tmp_path / "ibsim.log").open("w") as log:
        simulator = subprocess.Popen(
            ["ibsim", "-s", "net"], cwd=tmp_path, env=env, text=True,
            stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline_s = time.monotonic() + START_S
        while "simulator ready" not in (tmp_path / "ibsim.log").read_text():
            assert simulator.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        tools = {**env, "LD_PRELOAD": str(library), "SIM_HOST": "HostA"}
        yield Subnet(tmp_path, tmp_path / "sys", tools)
    finally:
        simulator.kill()
        simulator.wait(10)


def make(ib: dict[str, object]) -> ClusterConfig:
    nodes = [{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}]
    return parse({"model": {"path": "x"}, "nodes": nodes, "fabric": {"kind": "ib", "ib": ib}})


def verdicts(config: ClusterConfig, subnet: Subnet) -> dict[str, Verdict]:
    report = check(config, config.nodes[:1], Fabric.IB, subnet, 0)
    return {found.what: found.verdict for found in report.checks}


def test_opensm_makes_the_classes_and_the_check_sees_them(subnet: Subnet) -> None:
    config = make({})
    before = verdicts(config, subnet)
    assert before["high table"] is before["low table"] is Verdict.NOT_IN_FORCE
    said = subnet.configure(config)
    for setting in ("qos = TRUE", "qos_ca_high_limit = 240", "qos_swe_high_limit = 240"):
        assert f"Loading Cached Option:{setting}" in said
    after = verdicts(config, subnet)
    # ibsim does not keep the high limit that opensm sends: the check is right to notice.
    assert after.pop("high limit") is Verdict.NOT_IN_FORCE
    assert set(after) == {"lanes in operation", "sl2vl", "high table", "low table"}
    assert set(after.values()) == {Verdict.IN_FORCE}
    other = verdicts(make({"vlarb_low": "0:192,1:192,2:128,3:192"}), subnet)
    assert other["low table"] is Verdict.NOT_IN_FORCE and other["high table"] is Verdict.IN_FORCE
