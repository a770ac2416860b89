"""Starts a cluster on Ray: one actor per engine, which runs ``dualpath engine`` as its child.

    ray start --head ...                         # and `ray start --address ...` on every node, with
                                                 # --resources '{"dualpath-p0": 1}' on machine p0
    python launch.py /etc/dualpath/cluster.toml

Every machine has this package, the cluster file and the store under the same paths. Ray only places
and restarts processes: bytes and requests never pass through it. Ctrl-C stops all of it.
"""

from __future__ import annotations

import subprocess
import sys
import time

import ray

from dualpath import config as cluster
from dualpath.config import Role

_POLL_S = 1.0
_STOP_S = 30.0


@ray.remote(max_restarts=-1)
class Process:
    """One child process, started again when it ends."""

    def __init__(self, argv: list[str]) -> None:
        self._argv = argv
        self._child = subprocess.Popen(argv)

    def check(self) -> int:
        """Start the child again when it has ended; its process number."""
        if self._child.poll() is not None:
            self._child = subprocess.Popen(self._argv)
        return self._child.pid

    def stop(self) -> None:
        """End the child in order."""
        self._child.terminate()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def main(file: str) -> None:
    """Run until interrupted."""
    described = cluster.load(file)
    ray.init(address="auto")
    processes = [Process.options(num_cpus=1).remote(["dualpath", "serve", "--config", file])]
    for role in Role:
        for rank, (node, _) in enumerate(described.engines(role)):
            argv = ["dualpath", "engine", "--config", file, "--role", role.value]
            place = Process.options(
                num_gpus=1, resources={f"dualpath-{node.name}": 1 / node.engines}
            )
            processes.append(place.remote([*argv, "--rank", str(rank)]))
    try:
        while True:
            ray.get([process.check.remote() for process in processes])
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        ray.get([process.stop.remote() for process in reversed(processes)])


if __name__ == "__main__":
    main(sys.argv[1])
