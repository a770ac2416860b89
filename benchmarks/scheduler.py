"""Assignments a second on one core, with 48,000 requests waiting all the time.

One assignment is PE + DE + read path. Every tick each group's leader reports all its engines and
fetches, as in a live cluster; what was assigned moves on by a stage, and every finished round is
followed by a new one, so the backlog never shrinks. The clusters have one PE node for two DE nodes.

``assignments_per_s`` counts the time inside ``fetch``, the application of the reports included;
``lifecycle_per_s`` also that inside ``submit``, ``read_done``, ``prefill_done`` and ``finish``;
``one_group_per_s`` is the first figure with all PEs in one group and all DEs in another, the worst
case for a scheduler that looks at every engine. Seconds are CPU seconds of the one thread, so that
other work on the machine does not count. Best of ``--repeat`` runs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque

from dualpath.config import Role
from dualpath.scheduler import (
    Assignment,
    EngineReport,
    EngineSpec,
    Request,
    Scheduler,
    SchedulerSettings,
)  # fmt: skip

BLOCK_TOKENS = 64
PREFILL_TICKS = 2
DECODE_TICKS = 3


class Bench:
    """A cluster in which every stage of a request lasts a fixed number of ticks."""

    def __init__(self, engines: int, waiting: int, policy: str, one_group: bool, seed: int) -> None:
        self._random = random.Random(seed)
        self._scheduler = Scheduler(SchedulerSettings(3_000_000, 400_000, policy=policy))
        self._groups: dict[str, list[EngineSpec]] = {}
        self._requests: dict[str, Request] = {}
        self._stage: dict[str, deque[list[Assignment]]] = {
            "prefill": deque([[] for _ in range(PREFILL_TICKS)]),
            "decode": deque([[] for _ in range(DECODE_TICKS)]),
        }
        self._tok: dict[str, int] = {}
        self._seq: dict[str, int] = {}
        self._used: dict[str, int] = {}
        self._serial = 0
        per_node = min(8, engines // 4)
        nodes = engines // per_node
        prefill_nodes = max(1, round(nodes / 3))
        for node in range(nodes):
            role = Role.PREFILL if node < prefill_nodes else Role.DECODE
            group = role.value if one_group else f"{role.value}-{node}"
            for local in range(per_node):
                spec = EngineSpec(
                    f"{role.value}-{node}-{local}", role, group, f"node{node}", 1_500_000, 1e6
                )
                self._scheduler.add_engine(spec)
                self._groups.setdefault(group, []).append(spec)
                self._tok[spec.name] = self._seq[spec.name] = self._used[spec.name] = 0
        for _ in range(waiting):
            self._scheduler.submit(self._request())

    def _request(self) -> Request:
        self._serial += 1
        prompt = self._random.randrange(1_000, 64_000)
        hit = int(prompt * 0.97) // BLOCK_TOKENS * BLOCK_TOKENS
        request = Request(f"r{self._serial}", prompt, hit, 176, BLOCK_TOKENS)
        self._requests[request.rid] = request
        return request

    def _book(self, engine: str, sign: int, request: Request, hbm: bool) -> None:
        self._tok[engine] += sign * request.prompt_tokens
        self._seq[engine] += sign
        if hbm:
            self._used[engine] += sign * request.hbm_tokens

    def tick(self, now_s: float) -> tuple[int, float, float]:
        """``(assignments, CPU seconds in fetch, CPU seconds in all calls)``."""
        scheduler = self._scheduler
        fetch_s = other_s = 0.0
        new: list[Assignment] = []
        for group, specs in self._groups.items():
            reports = [
                EngineReport(s.name, self._seq[s.name], self._tok[s.name], 0, self._used[s.name])
                for s in specs
            ]
            begin = time.thread_time()
            decisions = scheduler.fetch(group, reports, now_s)
            fetch_s += time.thread_time() - begin
            for assignment in decisions.assigned:
                request = self._requests[assignment.rid]
                self._book(assignment.prefill, 1, request, hbm=False)
                self._book(assignment.decode, 1, request, hbm=True)
            new.extend(decisions.assigned)
        self._stage["prefill"].append(new)
        prefilled = self._stage["prefill"].popleft()
        self._stage["decode"].append(prefilled)
        finished = self._stage["decode"].popleft()
        for assignment in prefilled:
            self._book(assignment.prefill, -1, self._requests[assignment.rid], hbm=False)
        for assignment in finished:
            self._book(assignment.decode, -1, self._requests.pop(assignment.rid), hbm=True)
        fresh = [self._request() for _ in finished]
        begin = time.thread_time()
        for assignment in prefilled:
            scheduler.read_done(assignment.rid, Role.PREFILL)
            scheduler.read_done(assignment.rid, Role.DECODE)
            scheduler.prefill_done(assignment.rid)
        for assignment in finished:
            scheduler.finish(assignment.rid)
        for request in fresh:
            scheduler.submit(request)
        other_s += time.thread_time() - begin
        return len(new), fetch_s, fetch_s + other_s

    def run(self, seconds: float) -> tuple[float, float]:
        """Assignments a second, in ``fetch`` alone and over the life cycle."""
        now_s = 0.0
        for _ in range(PREFILL_TICKS + DECODE_TICKS + 1):  # until the pipeline is full
            self.tick(now_s)
            now_s += 0.05
        count, fetch_s, all_s = 0, 0.0, 0.0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            assigned, in_fetch_s, in_all_s = self.tick(now_s)
            now_s += 0.05
            count += assigned
            fetch_s += in_fetch_s
            all_s += in_all_s
        self._scheduler.check_integrity()
        return count / fetch_s, count / all_s


def main() -> None:
    """Measure and print; ``--json`` prints one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 144, 1152])
    parser.add_argument("--waiting", type=int, default=48_000)
    parser.add_argument("--policy", default="paper")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of one run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = ("assignments_per_s", "lifecycle_per_s", "one_group_per_s")
    rates: dict[str, dict[str, int]] = {name: {} for name in names}
    for engines in args.engines:
        best = [0.0, 0.0, 0.0]
        for _ in range(args.repeat):
            own = Bench(engines, args.waiting, args.policy, False, args.seed).run(args.seconds)
            one, _ = Bench(engines, args.waiting, args.policy, True, args.seed).run(args.seconds)
            best = [max(pair) for pair in zip(best, (*own, one), strict=True)]
        for name, rate in zip(names, best, strict=True):
            rates[name][str(engines)] = round(rate)
        print(
            f"{engines:5d} engines: " + ", ".join(f"{n} {rates[n][str(engines)]:,}" for n in names)
        )
    if args.json:
        print(json.dumps(rates))


if __name__ == "__main__":
    main()
