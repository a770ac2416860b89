"""Measures the SNIC read rate of every node of a role with bursts of prompts that hit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dualpath.config import Role
from dualpath.workload.agents import FIRST_PLAIN_ID
from dualpath.workload.profile_options import Report
from dualpath.workload.profile_target import ProfileFailed, Target, View
from dualpath.workload.snic_rate import Busy, Look, over_all, while_busy

BUSY_S: Final = 2.0
"""A SNIC must have been seen busy for this long; else its rate is a lower bound."""
_LOOK_STEP_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class SnicRate:
    """Of one node.

    Attributes:
        bytes_s: read from storage in a second.
        exact: False when the node was never kept busy for ``BUSY_S``: it can do that much at least.
    """

    bytes_s: float
    exact: bool


class SnicBench:
    """One role's nodes. The front must already read on that side only.

    Args:
        prompts: stored prompts of whole blocks, all of one length.
    """

    def __init__(
        self, target: Target, role: Role, prompts: Sequence[Sequence[int]], block_tokens: int
    ) -> None:
        self._target = target
        self._role = role
        self._prompts = prompts
        self._block_tokens = block_tokens

    async def rates(self, view: View, report: Report) -> dict[str, SnicRate]:
        """Bursts of growing size until every node was busy for long enough.

        Raises:
            ProfileFailed: a prompt failed or did not hit, or a node read nothing.
        """
        engines = len(view.usable(self._role))
        most = len(self._prompts[0]) // self._block_tokens
        sizes = [(min(4, most), 2), (min(16, most), 2), (most, 2), (most, 8), (most, 24)]
        found: dict[str, tuple[Busy, bool]] = {}
        for step, (blocks, each) in enumerate(sizes):
            report(f"SNIC reads, {self._role.value}", step, len(sizes))
            start_s = _now_s()
            for node, looks in (await self._burst(blocks, each * engines)).items():
                busy = while_busy(looks)
                if busy.seconds >= BUSY_S:
                    found[node] = (busy, True)
                    continue
                known, exact = found.get(node, (Busy(0, 0.0), False))
                if not exact:
                    bound = over_all(looks, start_s)
                    found[node] = (max(known, bound, key=lambda b: b.bytes_s), False)
            if all(exact for _, exact in found.values()):
                break
        for node, (busy, _) in found.items():
            if not busy.read_bytes:
                raise ProfileFailed(f"node {node} read nothing from storage")
        return {node: SnicRate(busy.bytes_s, exact) for node, (busy, exact) in found.items()}

    async def _burst(self, blocks: int, count: int) -> dict[str, list[Look]]:
        """``count`` prompts at once that hit ``blocks``; looks at the nodes."""
        tokens = blocks * self._block_tokens
        asked = asyncio.gather(
            *(
                self._target.prompt(
                    [*self._prompts[number % len(self._prompts)][:tokens], _any_token()]
                )
                for number in range(count)
            )
        )
        looks: dict[str, list[Look]] = {}
        try:
            over = False
            while not over:
                over = asked.done()  # one more look after the end
                view = await self._target.view()
                for node, look in _looks(view, self._role).items():
                    looks.setdefault(node, []).append(look)
                await asyncio.sleep(_LOOK_STEP_S)
            for answer in await asked:
                if answer.cached_tokens != tokens:
                    raise ProfileFailed(
                        f"a stored prompt of {tokens} tokens hit only {answer.cached_tokens}: is "
                        "the store full or failing?"
                    )
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        return looks


def _looks(view: View, role: Role) -> dict[str, Look]:
    """Every node of ``role`` now."""
    queued: dict[str, bool] = {}
    for engine in view.usable(role):
        queued[engine.node] = queued.get(engine.node, True) and (engine.stats.read_queue_tokens > 0)
    now_s = _now_s()
    return {node: Look(now_s, view.snic.get(node, 0), busy) for node, busy in queued.items()}


def _any_token() -> int:
    """What follows a hit: one token must always be computed."""
    return random.randrange(FIRST_PLAIN_ID, 2 * FIRST_PLAIN_ID)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
