"""A cluster whose processes a test starts, kills, stops and restarts one by one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from cluster_kit import START_S, Running, start

from dualpath import config as cluster_config
from dualpath.config import ClusterConfig

PROGRAM = str(Path(sys.executable).with_name("dualpath"))


class Parts:
    """Front and engines, each a process group, as a cluster manager would run them."""

    def __init__(self, config: ClusterConfig, folder: Path, control: str = "") -> None:
        """``control``: where engines find the front, when not where it listens."""
        self.config = config
        self.control = control
        self.folder = folder
        self.file = folder / "cluster.toml"
        self.file.write_text(cluster_config.dump(config))
        self.running: dict[str, Running] = {}
        self._starts = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.config.front.port}"

    def start(self, name: str) -> Running:
        """``front``, ``pe0``, ``de0``, ..."""
        self._starts += 1
        if name == "front":
            argv = [PROGRAM, "serve", "--config", str(self.file)]
        else:
            role = "prefill" if name.startswith("pe") else "decode"
            argv = [
                PROGRAM, "engine", "--config", str(self.file), "--role", role,
                "--rank", name[2:], "--run-dir", str(self.folder / "run"),
                *(["--control", self.control] if self.control else []),
            ]  # fmt: skip
        self.running[name] = start(argv, self.folder / f"{name}.{self._starts}.log", self.url)
        return self.running[name]

    def processes(self, name: str) -> list[psutil.Process]:
        """The process and all its descendants."""
        leader = psutil.Process(self.running[name].process.pid)
        return [leader, *leader.children(recursive=True)]

    def kill(self, name: str) -> None:
        """kill -9 of all of it at once, as when a machine loses power."""
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.running.pop(name).process.wait(30)

    def signal(self, name: str, number: signal.Signals) -> None:
        for process in self.processes(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                os.kill(process.pid, number)

    def stop_all(self) -> None:
        for name in list(self.running):
            if self.running[name].process.poll() is None:
                self.signal(name, signal.SIGCONT)
                self.kill(name)

    def until_ready(self) -> None:
        """Wait until the front can serve; fails at once when a process ends."""
        front = self.running["front"]
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            for name, running in self.running.items():
                if running.process.poll() is not None:
                    pytest.fail(f"{name} ended at start\n{running.tail()}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{front.url}/ready", timeout=10) as answer,
            ):
                if answer.status == 200:
                    return
            time.sleep(0.3)
        pytest.fail(f"not ready within {START_S:g} s\n{front.tail()}")

    def rss_bytes(self, name: str) -> int:
        """Memory of the process and all its descendants."""
        return sum(process.memory_info().rss for process in self.processes(name))

    def log(self, name: str) -> str:
        """What its present process has logged."""
        return self.running[name].log.read_text(errors="replace")
