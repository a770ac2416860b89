"""The paper's policy written as plainly as possible: everything is recounted at every step.

Slow and without any cleverness, so that it can be read beside docs/scheduler.md; the tests compare
the real scheduler with it, decision by decision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dualpath.config import Role
from dualpath.scheduler import Assignment, EngineSpec, ReadPlan, Request, SchedulerSettings


@dataclass
class RefRequest:
    request: Request
    pe: str | None = None
    de: str | None = None
    group: str | None = None
    complete: bool = False
    prefilled: bool = False
    pe_read: int = 0
    de_read: int = 0


@dataclass
class Reference:
    settings: SchedulerSettings
    engines: dict[str, EngineSpec] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    used: dict[str, int] = field(default_factory=dict)
    requests: dict[str, RefRequest] = field(default_factory=dict)  # in order of arrival

    def add(self, spec: EngineSpec) -> None:
        self.engines[spec.name] = spec
        self.active.add(spec.name)
        self.used[spec.name] = 0

    def of(self, name: str) -> list[RefRequest]:
        """Requests on an engine."""
        return [
            r for r in self.requests.values() if (r.pe == name and not r.prefilled) or r.de == name
        ]

    def tok(self, name: str) -> int:
        return sum(r.request.prompt_tokens for r in self.of(name))

    def seq(self, name: str) -> int:
        return len(self.of(name))

    def read_q(self, node: str) -> int:
        total = 0
        for r in self.requests.values():
            if r.pe is not None and not r.prefilled and self.engines[r.pe].node == node:
                total += r.pe_read
            if r.de is not None and self.engines[r.de].node == node:
                total += r.de_read
        return total

    def free(self, name: str) -> int:
        promised = sum(r.request.hbm_tokens for r in self.of(name))
        return max(0, self.engines[name].hbm_tokens - max(promised, self.used[name]))

    def members(self, group: str) -> list[str]:
        return [n for n, s in self.engines.items() if s.group == group and n in self.active]

    def largest(self, group: str) -> int:
        return max((self.engines[n].hbm_tokens for n in self.members(group)), default=0)

    def total(self, group: str) -> int:
        queued = sum(r.request.prompt_tokens for r in self.requests.values() if r.group == group)
        return queued + sum(self.tok(name) for name in self.members(group))

    def take_out(self, name: str) -> None:
        self.active.discard(name)
        for r in self.requests.values():
            if not r.complete:
                r.pe = None if r.pe == name else r.pe
                r.de = None if r.de == name else r.de
            if r.group is not None and r.request.hbm_tokens > self.largest(r.group):
                r.group = None

    def remove(self, name: str) -> tuple[list[str], list[str]]:
        """Dropped rids, and rids that are now larger than any HBM."""
        self.take_out(name)
        dropped = [r.request.rid for r in self.of(name)]
        for rid in dropped:
            del self.requests[rid]
        del self.engines[name]
        largest = max((spec.hbm_tokens for spec in self.engines.values()), default=0)
        too_large = [
            rid
            for rid, r in self.requests.items()
            if r.de is None and largest and r.request.hbm_tokens > largest
        ]
        for rid in too_large:
            del self.requests[rid]
        return dropped, too_large

    def fetch(self, group: str) -> list[Assignment]:
        specs = [spec for spec in self.engines.values() if spec.group == group]
        if not self.members(group):
            return []
        return self._prefill(group) if specs[0].role is Role.PREFILL else self._decode(group)

    def _prefill(self, group: str) -> list[Assignment]:
        done = []
        for r in self.requests.values():
            if r.pe is not None or r.complete:
                continue
            able = [n for n in self.members(group) if self.tok(n) <= self.settings.beta_tokens]
            short = [
                n for n in able if self.read_q(self.engines[n].node) <= self.settings.alpha_tokens
            ]
            if not able:
                break
            r.pe = min(short or able, key=self.tok)
            done += self._complete(r)
        return done

    def _decode(self, group: str) -> list[Assignment]:
        groups = list(
            dict.fromkeys(s.group for s in self.engines.values() if s.role is Role.DECODE)
        )
        for r in self.requests.values():
            if r.de is None and r.group is None:
                able = [g for g in groups if self.largest(g) >= r.request.hbm_tokens]
                r.group = min(able, key=self.total, default=None)
        queue = [r for r in self.requests.values() if r.group == group]
        room = sum(self.free(name) for name in self.members(group))
        fitting = 0
        for r in queue:
            room -= r.request.hbm_tokens
            if room < 0:
                break
            fitting += r.request.prompt_tokens
        names = self.members(group)
        z = self.settings.z_factor * ((fitting + sum(map(self.tok, names))) / len(names))
        done = []
        for r in queue:
            able = [name for name in names if self.free(name) >= r.request.hbm_tokens]
            low = [n for n in able if self.tok(n) + r.request.prompt_tokens <= math.floor(z)]
            if low:
                r.de = min(low, key=lambda n: (self.seq(n), self.tok(n)))
            elif able:
                r.de = min(able, key=self.tok)
            else:
                break
            r.group = None
            done += self._complete(r)
        return done

    def _complete(self, r: RefRequest) -> list[Assignment]:
        if r.pe is None or r.de is None:
            return []
        r.complete = True
        hit = r.request.hit_tokens
        pe_q = self.read_q(self.engines[r.pe].node)
        de_q = self.read_q(self.engines[r.de].node)
        if de_q < pe_q:
            r.de_read = hit
        else:
            r.pe_read = hit
        return [Assignment(r.request.rid, r.pe, r.de, ReadPlan(r.pe_read, r.de_read))]
