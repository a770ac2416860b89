"""The experiment of the traffic classes: model traffic between two nodes, alone and beside KV.

No engines: processes in the nodes' namespaces send what engines would. KV ``on`` uses the ports by
which its class is told; ``off`` uses others, so that it is in the model's class. All processes live
through the whole experiment, and what is compared alternates every few seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dualpath.config import dump
from dualpath.lab.describe import cluster_of
from dualpath.lab.experiments import ISOLATION, Experiment
from dualpath.lab.names import CNIC
from dualpath.lab.network import LabError, LabNetwork, lab_network
from dualpath.lab.running import claim_folder
from dualpath.lab.spec import LabSpec
from dualpath.report.lab.results import SUMMARY, Check, IsolationResult, Summary, write
from dualpath.workload.measure import rank

RATES: Final = (50.0, 100.0)
"""Of the storage and the compute NIC, Mbit/s. All-reduces at 400 Mbit/s, a lab's usual, and KV
together need more than two cores, and the classes are to be judged, not the cores."""
REPEATS: Final = 5
RATE_SHARE: Final = 0.95
P99_RATIO: Final = 2.0
_OP_BYTES: Final = 1 << 20
_ROUND_S: Final = 10.0
_SETTLE_S: Final = 1.0
_ANSWER_S: Final = 120.0
"""torch takes half a minute to import on a busy machine."""
_END_S: Final = 20.0
_TITLE: Final = "Traffic classes on the compute network"
_UNCLASSED_PORTS: Final = "21504-21535"
_MASTER_PORT: Final = 29500
_NAMES: Final = ("solo", "on", "off")
_BITS: Final = 8


async def run_isolation(
    spec: LabSpec, root: Path, repeats: int | None, say: Callable[[str], None]
) -> Summary:
    """Run it and write its summary, anew after every round.

    Args:
        repeats: rounds of each; the experiment's own when None.
        say: told what goes on.

    Raises:
        ConfigError: no lab can be made here.
        LabError: something failed.
        ResultError: ``root`` holds another experiment, or cannot be used.
    """
    spec = dataclasses.replace(spec, prefill=1, decode=1, isolation=True)
    claim_folder(Experiment(ISOLATION, _TITLE, ()), spec, root)
    rounds: dict[str, list[_Round]] = {name: [] for name in _NAMES}
    with contextlib.ExitStack() as stack:
        say("isolation: two nodes ...")
        # Blocks for a few seconds; nothing else runs in this loop yet.
        network = stack.enter_context(lab_network(spec, root / "run"))
        async with _traffic(network, spec, root) as traffic:
            for repeat in range(repeats or REPEATS):
                order = _NAMES if repeat % 2 == 0 else _NAMES[::-1]
                for name in order:
                    rounds[name].append(await traffic.one(name))
                shown = ", ".join(
                    f"{name} {rounds[name][-1].rate_bytes_per_s * _BITS / 1e6:.0f} Mbit/s"
                    for name in _NAMES
                )
                say(f"isolation {repeat + 1}/{repeats or REPEATS}: {shown}")
                # Every time: whatever ends the experiment, what was measured is there.
                summary = _summary(rounds, spec)
                write(root / SUMMARY, summary)
    return summary


def _summary(rounds: dict[str, list[_Round]], spec: LabSpec) -> Summary:
    return Summary(
        experiment=ISOLATION,
        title=_TITLE,
        machine=f"{os.cpu_count()} CPU cores",
        snic_bytes_per_s=spec.snic_bytes_per_s,
        cnic_bytes_per_s=spec.cnic_bytes_per_s,
        tokens_equal=None,
        first_difference="",
        cases=[],
        isolation=[_result(name, rounds[name]) for name in _NAMES],
        isolation_checks=judge(rounds),
    )


@dataclass(frozen=True, slots=True)
class _Round:
    """A few seconds of all-reduces: the time of each, and KV written beside them."""

    op_s: list[float]
    kv_bytes_per_s: float

    @property
    def rate_bytes_per_s(self) -> float:
        return _OP_BYTES / statistics.fmean(self.op_s)

    @property
    def p99_s(self) -> float:
        return rank(sorted(self.op_s), 0.99)


def judge(rounds: dict[str, list[_Round]]) -> list[Check]:
    """Targets, from the medians of the rounds' own ratios to the same round without KV."""

    def ratio(name: str, value: Callable[[_Round], float]) -> float:
        pairs = zip(rounds[name], rounds["solo"], strict=True)
        return statistics.median(value(one) / value(alone) for one, alone in pairs)

    return [
        Check(name="rate.on", value=ratio("on", lambda one: one.rate_bytes_per_s),
              target=RATE_SHARE, text="rate of all-reduces beside KV, of that alone"),
        Check(name="p99.on", value=ratio("on", lambda one: one.p99_s), target=P99_RATIO,
              at_most=True, text="99th percentile of one, beside KV over alone"),
        Check(name="rate.off", value=ratio("off", lambda one: one.rate_bytes_per_s),
              target=RATE_SHARE, at_most=True,
              text="the same with KV in the model's class: to be visibly worse"),
    ]  # fmt: skip


def _result(name: str, rounds: Sequence[_Round]) -> IsolationResult:
    ordered = sorted(seconds for one in rounds for seconds in one.op_s)
    return IsolationResult(
        name=name,
        ops=len(ordered),
        nbytes=_OP_BYTES,
        bytes_per_s=statistics.median(one.rate_bytes_per_s for one in rounds),
        p50_s=rank(ordered, 0.5),
        p99_s=rank(ordered, 0.99),
        kv_bytes_per_s=statistics.median(one.kv_bytes_per_s for one in rounds),
    )


class _Program:
    """A process in a node that answers each line it is told with a line of JSON."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self._name, self._process, self._log = name, process, log

    async def answer(self) -> dict[str, Any]:
        """Its next one.

        Raises:
            LabError: it ended, or says nothing.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(_ANSWER_S):
                async for line in self._process.stdout:
                    if line.startswith(b"{"):  # libraries log on standard output
                        found: dict[str, Any] = json.loads(line)
                        return found
        except TimeoutError:
            raise LabError(f"{self._name}: no answer in {_ANSWER_S:.0f} s; {self._log}") from None
        raise LabError(f"{self._name}: ended; {self._log} says why")

    async def tell(self, line: str) -> dict[str, Any]:
        """Its answer to a line.

        Raises:
            LabError: see ``answer``.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        return await self.answer()

    async def end(self) -> None:
        """Whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        with contextlib.suppress(TimeoutError):  # the keeper of the lab kills what is left
            async with asyncio.timeout(_END_S):
                await self._process.wait()


class _Traffic:
    """Every program, joined with its peers."""

    def __init__(self, leader: _Program, loads: dict[str, list[_Program]]) -> None:
        self._leader, self._loads = leader, loads

    async def one(self, name: str) -> _Round:
        """A round with the load called ``name``, if there is one."""
        loads = self._loads.get(name, [])
        begun_s, before = time.monotonic(), await self._tell(loads, "on")
        await asyncio.sleep(_SETTLE_S)
        answer = await self._leader.tell(f"{_ROUND_S}")
        after, seconds = await self._tell(loads, "off"), time.monotonic() - begun_s
        return _Round(answer["op_s"], (after - before) / seconds)

    async def _tell(self, loads: Sequence[_Program], line: str) -> int:
        answers = await asyncio.gather(*(load.tell(line) for load in loads))
        return sum(answer["written_bytes"] for answer in answers)


@contextlib.asynccontextmanager
async def _traffic(network: LabNetwork, spec: LabSpec, root: Path) -> AsyncIterator[_Traffic]:
    nodes = network.nodes
    async with contextlib.AsyncExitStack() as stack:

        async def start(node: str, name: str, *argv: str) -> _Program:
            log = root / "run" / f"{name}-{node}.log"
            command = network.command(
                node, [sys.executable, "-m", f"dualpath.lab.{argv[0]}", *argv[1:]]
            )
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    stderr=errors, env={**os.environ, "OMP_NUM_THREADS": "1"},
                    limit=1 << 24,
                )  # fmt: skip
            program = _Program(f"{name} in {node}", process, log)
            stack.push_async_callback(program.end)
            return program

        master = f"{network.address(nodes[0])}:{_MASTER_PORT}"
        reducers = [
            await start(node, "allreduce", "allreduce", "--rank", str(number), "--world",
                        str(len(nodes)), "--master", master, "--device", CNIC, "--nbytes",
                        str(_OP_BYTES))
            for number, node in enumerate(nodes)
        ]  # fmt: skip
        loads: dict[str, list[_Program]] = {}
        for name, tables in (("on", {}), ("off", {"fabric": {"kv": {"ports": _UNCLASSED_PORTS}}})):
            folder = root / "run" / f"kv-{name}"
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob("*.json"):
                left.unlink()
            config = folder / "cluster.toml"
            config.write_text(dump(cluster_of(dataclasses.replace(spec, tables=tables))))
            loads[name] = [
                await start(node, f"kv-{name}", "kv_load", str(config), str(folder), node, peer)
                for node, peer in (nodes, nodes[::-1])
            ]
        for program in (reducers[0], *loads["on"], *loads["off"]):
            await program.answer()
        yield _Traffic(reducers[0], loads)
