"""Memory of an engine and time to start, beside a plain vLLM of the same settings.

    python benchmarks/engines.py --json                         # the tiny model
    python benchmarks/engines.py --model smollm2 --json
    python benchmarks/engines.py --run 'python benchmarks/front.py --kinds chat --tokens 8 40 \\
        --prompt 200 --requests 10 --url $CLUSTER_URL --direct-url $PLAIN_URL'

Starts a plain vLLM, stops it, then ``dualpath up`` with one PE and one DE, each ``--rounds`` times;
with ``--run`` both at once, and runs a command against them. Times are from the start of the
program: ``ready_s`` until it answers that it is, ``first_token_s`` until the first token of a first
request has come. Memory is taken after ``--requests`` requests: proportional set size (PSS: shared
pages are divided by those who share them) of an engine's processes, and of the front. An engine's
staging buffers are part of it as far as they have been touched; their sizes stand beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from common import Sample, arguments, finish, machine, median, say
from dualpath import config as cluster
from dualpath.cli.defaults import default_cluster
from dualpath.config import ClusterConfig, Mode
from dualpath.engine import models
from dualpath.engine.launch import installed_device, plain_command
from dualpath.serve.ports import free_ports

START_S = 400.0
STOP_S = 60.0
HOST = "127.0.0.1"


class Server:
    """A program that serves the OpenAI API; a process group of ours."""

    def __init__(self, argv: list[str], env: dict[str, str], url: str, ready: str, log: Path):
        self.url = url
        self._log = log
        self._begin_s = time.perf_counter()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                argv, env={**os.environ, **env}, stdout=out, stderr=out, start_new_session=True
            )
        self._ready = ready

    def wait_ready(self) -> float:
        """Seconds from the start until it answers 200.

        Raises:
            RuntimeError: it ended, or takes too long.
        """
        while time.perf_counter() - self._begin_s < START_S:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended:\n{self._log.read_text()[-3000:]}")
            try:
                with urllib.request.urlopen(self.url + self._ready, timeout=5) as answer:
                    if answer.status == 200:
                        return time.perf_counter() - self._begin_s
            except OSError:  # refused, reset, 503: not yet
                pass
            time.sleep(0.1)
        raise RuntimeError(f"not ready within {START_S:g} s:\n{self._log.read_text()[-3000:]}")

    def first_token(self, model: str, prompt: list[int]) -> float:
        """Seconds from the start until a request's first token."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "stream": True,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(),
            {"content-type": "application/json"},
        )  # fmt: skip
        first = 0.0
        with urllib.request.urlopen(request, timeout=START_S) as answer:
            for line in answer:
                if line.startswith(b"data:") and not first:
                    first = time.perf_counter() - self._begin_s
        return first

    def trees(self) -> dict[str, int]:
        """PSS in bytes by part: ``prefill``, ``decode`` and ``front``, or ``plain``."""
        sums: dict[str, int] = {}
        top = psutil.Process(self._process.pid)
        for process in [top, *top.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                part = part_of(process, top)
                sums[part] = sums.get(part, 0) + process.memory_full_info().pss
        return sums

    def stop(self) -> None:
        """End it and all it has started."""
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(STOP_S)


def part_of(process: psutil.Process, top: psutil.Process) -> str:
    """Which engine a process belongs to, by the command lines of its ancestors."""
    while process != top:
        words = process.cmdline()
        # vLLM's own processes rename themselves; the API server's connector settings name the role.
        for role in ("prefill", "decode"):
            if any(f'"role": "{role}"' in word or word == role for word in words):
                return role
        parent = process.parent()
        if parent is None:
            break
        process = parent
    return "top"


@contextlib.contextmanager
def plain_server(config: ClusterConfig, folder: Path) -> Iterator[Server]:
    """vLLM without connector."""
    (port,) = free_ports(HOST, 1)
    command = plain_command(
        config, python=sys.executable, device=installed_device(), host=HOST, http_port=port,
        inherited=os.environ,
    )  # fmt: skip
    url = f"http://{HOST}:{port}"
    server = Server(list(command.argv), dict(command.env), url, "/health", folder / "plain.log")
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def cluster_server(config: ClusterConfig, folder: Path) -> Iterator[Server]:
    """``dualpath up``."""
    file = folder / "cluster.toml"
    file.write_text(cluster.dump(config))
    argv = [sys.executable, "-m", "dualpath.cli.main", "up", "--config", str(file),
            "--run-dir", str(folder / "run")]  # fmt: skip
    url = f"http://{HOST}:{config.front.port}"
    server = Server(argv, {}, url, "/ready", folder / "up.log")
    try:
        yield server
    finally:
        server.stop()


def used(server: Server, config: ClusterConfig, requests: int) -> tuple[Sample, dict[str, int]]:
    """Times and memory of a server that has just been started."""
    times = {"ready_s": server.wait_ready()}
    prompt = [(7 * i) % 1000 + 100 for i in range(256)]
    times["first_token_s"] = server.first_token(config.model.name, prompt)
    for number in range(1, requests):
        server.first_token(config.model.name, [number + 100, *prompt])
    return times, server.trees()


def described(model: str, folder: Path) -> ClusterConfig:
    """1 PE + 1 DE, sized as ``dualpath up`` does without a file."""
    bundled = models.bundled(model)
    path = str(models.ensure(bundled)) if bundled is not None else model
    (port,) = free_ports(HOST, 1)
    return default_cluster(
        path, mode=Mode.DUALPATH, prefill=1, decode=1, store=folder / "store", port=port
    )


def measure(args: Any, folder: Path) -> dict[str, Any]:
    """Times and memory of both, ``--rounds`` times in turns."""
    config = described(args.model, folder)
    times: dict[str, list[Sample]] = {"plain": [], "cluster": []}
    memory: dict[str, list[int]] = {}
    for number in range(args.rounds):
        order = [("plain", plain_server), ("cluster", cluster_server)]
        for name, start in order if number % 2 == 0 else order[::-1]:
            say(f"{name} ...")
            with start(config, folder) as server:
                sample, parts = used(server, config, args.requests)
            say(f"{name}: {sample}, {parts}")
            times[name].append(sample)
            for part, nbytes in parts.items():
                title = part if part != "top" else {"plain": "plain", "cluster": "front"}[name]
                memory.setdefault(title, []).append(nbytes)
    buffers = config.buffers
    return {
        "model": config.model.name,
        "kv_cache_bytes": int(config.engine.kv_cache),
        "buffers_bytes": {
            "prefill": int(buffers.prefill) + int(buffers.landing),
            "decode": int(buffers.decode) + int(buffers.persist),
        },
        "times": {
            name: {key: median(samples, key) for key in samples[0]}
            for name, samples in times.items()
        },
        "pss_bytes": {name: sorted(values)[len(values) // 2] for name, values in memory.items()},
    }


def run_beside(args: Any, folder: Path) -> dict[str, Any]:
    """Both servers, and a command that finds them in $CLUSTER_URL and $PLAIN_URL."""
    config = described(args.model, folder)
    with contextlib.ExitStack() as running:
        ours = running.enter_context(cluster_server(config, folder))
        plain = None
        if not args.no_plain:
            plain = running.enter_context(plain_server(config, folder))
            plain.wait_ready()
        ours.wait_ready()
        env = {
            **os.environ, "CLUSTER_URL": ours.url, "PLAIN_URL": plain.url if plain else "",
            "MODEL": config.model.name, "MODEL_PATH": config.model.path,
        }  # fmt: skip
        say(args.run)
        done = subprocess.run(args.run, shell=True, env=env, stdout=subprocess.PIPE, text=True)
        print(done.stdout, end="")
        if done.returncode:
            raise SystemExit(f"the command ended with {done.returncode}")
    return {"model": config.model.name, "command": args.run}


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="tiny", help="'tiny', 'smollm2' or a folder")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--requests", type=int, default=8, help="before memory is looked at")
    parser.add_argument("--no-plain", action="store_true", help="with --run: the cluster alone")
    parser.add_argument("--run", help="a shell command to run against both instead")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory(prefix="dualpath-bench-") as name:
        result |= run_beside(args, Path(name)) if args.run else measure(args, Path(name))
    if not args.run:
        print(json.dumps(result, indent=2))
    finish(result, args.json)


if __name__ == "__main__":
    main()
