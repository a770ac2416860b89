"""Agents: what they ask for and when they come."""

from __future__ import annotations

import copy
import math
import random
from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from dualpath.sim.plan import Plan
from dualpath.workload.blocks import block_tokens, has_blocks, prompt_blocks
from dualpath.workload.multiply import SYNTHETIC_ROUND_GEN, SYNTHETIC_ROUND_TOKENS
from dualpath.workload.trace import Trajectory

if TYPE_CHECKING:
    from dualpath.sim.nodes import DecodeEngine, PrefillEngine

_OVER: Final = -2
STORED_KEY: Final = "stored_tokens"
"""Key of a trajectory: so many of its first tokens have their KV stored before the run begins."""


class Script:
    """The rounds of one trajectory in three arrays, the block ids of its prompts if it has them
    (``workload.blocks``), and what is stored of it beforehand (``STORED_KEY``).

    Raises:
        ValueError: the latter is no number of tokens.
    """

    __slots__ = ("appends", "block_tokens", "blocks", "gens", "id", "latencies", "rounds", "stored")

    def __init__(self, trajectory: Trajectory) -> None:
        rounds = trajectory.rounds
        self.id: Final = trajectory.id
        self.rounds: Final = len(rounds)
        self.appends: Final = array("i", [item.append_tokens for item in rounds])
        self.gens: Final = array("i", [item.gen_tokens for item in rounds])
        latencies = [item.tool_latency_s or 0.0 for item in rounds]
        self.latencies: Final = array("d", latencies) if any(latencies) else None
        stored = trajectory.extra.get(STORED_KEY, 0)
        if not isinstance(stored, int) or stored < 0:
            raise ValueError(f"{trajectory.id}: {STORED_KEY} must be 0 or more, got {stored!r}")
        self.stored: Final = stored
        shared = has_blocks(trajectory)
        self.block_tokens: Final = block_tokens(trajectory) if shared else 0
        self.blocks: Final = (
            [array("q", ids) for ids in prompt_blocks(trajectory)] if shared else None
        )


class SharedBlocks:
    """Ids of the trace's blocks that are stored, whoever stored them.

    A round that is over has stored every block that its prompt fills. A prompt hits its longest
    run of stored blocks from its beginning. Agents that use a trajectory again stay out of it:
    their synthetic round makes all their blocks others.
    """

    def __init__(self) -> None:
        self._stored: set[int] = set()

    def tokens(self, script: Script, index: int) -> int:
        """Leading tokens of round ``index``'s prompt that are stored."""
        assert script.blocks is not None
        count = 0
        for block in script.blocks[index]:
            if block not in self._stored:
                break
            count += 1
        return count * script.block_tokens

    def add(self, script: Script, index: int, prompt_tokens: int) -> None:
        """Round ``index`` is over."""
        assert script.blocks is not None
        self._stored.update(script.blocks[index][: prompt_tokens // script.block_tokens])


class Scripts:
    """Trajectories by number, read when they are first asked for.

    Number k of n trajectories is trajectory ``k % n``; from k = n on it comes behind a synthetic
    round of its own, so that its blocks are not those of an earlier agent (this is how the paper
    multiplies its trajectories).
    """

    def __init__(self, trajectories: Iterable[Trajectory]) -> None:
        self._source: Iterator[Trajectory] | None = iter(trajectories)
        self._read: list[Script] = []

    def get(self, number: int) -> tuple[Script, bool]:
        """The script, and whether a synthetic round comes before it.

        Raises:
            ValueError: there are no trajectories.
        """
        while self._source is not None and number >= len(self._read):
            trajectory = next(self._source, None)
            if trajectory is None:
                self._source = None
            else:
                self._read.append(Script(trajectory))
        if not self._read:
            raise ValueError("trajectories: there are none")
        return self._read[number % len(self._read)], number >= len(self._read)

    def all(self) -> int:
        """Read everything; how many there are.

        Raises:
            ValueError: there are no trajectories.
        """
        if self._source is not None:
            self._read.extend(Script(trajectory) for trajectory in self._source)
            self._source = None
        if not self._read:
            raise ValueError("trajectories: there are none")
        return len(self._read)

    def hit_ratio(self, block_tokens: int, sample: int = 200) -> float:
        """Hit tokens over prompt tokens of the first trajectories: what ``profile`` would find."""
        hits = prompts = 0
        number = 0
        while number < sample:
            script, again = self.get(number)
            if again:
                break
            number += 1
            context = 0
            stored = script.stored
            for append, gen in zip(script.appends, script.gens, strict=True):
                prompt = context + append
                hits += min(stored, prompt - 1) // block_tokens * block_tokens
                prompts += prompt
                context = prompt + gen
                stored = context - 1 if gen else context
        return hits / prompts if prompts else 0.0


class Stage(IntEnum):
    """Where a round is; ``Agent.stage``."""

    QUEUED = 0
    """In the scheduler."""
    WAITS_DE = 1
    """For room in the DE's buffer."""
    WAITS_PE = 2
    """For room in the PE's buffer."""
    PREFILL = 3
    """Being read, waiting for a step, or in one."""
    COPY = 4
    """On its way into the DE's HBM."""
    DECODE = 5
    """Being decoded."""


class Agent:
    """One agent and its round under way: it has one at a time, so one object serves all of them.

    Times are seconds of the simulation, sizes tokens, unless a name says otherwise.
    """

    __slots__ = (
        "arrived_s", "context", "copy", "de", "de_tokens", "gen", "hit", "index", "left",
        "need_bytes", "pe", "pe_tokens", "pooled", "prompt", "rid", "script", "stage", "stored",
        "t_allocated", "t_assigned", "t_first", "t_read", "t_second", "t_submit",
    )  # fmt: skip

    def __init__(self, number: int, script: Script, synthetic: bool, arrived_s: float) -> None:
        self.rid: Final = f"a{number}"
        self.script: Final = script
        self.arrived_s: Final = arrived_s
        self.copy: Final = synthetic
        self.index = -1 if synthetic else 0  # of the round under way
        self.context = 0  # before the round
        self.stored = 0 if synthetic else script.stored  # tokens whose KV may be stored
        self.stage = Stage.QUEUED
        self.prompt = 0
        self.hit = 0
        self.left = 0  # still to be computed
        self.gen = 0
        self.need_bytes = 0.0  # of the DE's buffer, then of its HBM
        self.pe: PrefillEngine | None = None
        self.de: DecodeEngine | None = None
        self.pe_tokens = 0
        self.de_tokens = 0
        self.pooled = 0  # of ``pe_tokens``, those in the node's DRAM pool: not read
        self.t_submit = self.t_assigned = self.t_allocated = self.t_read = 0.0
        self.t_first = self.t_second = 0.0

    @property
    def shares(self) -> bool:
        """Whether the round's prompt has blocks that other agents may have stored."""
        return self.script.blocks is not None and not self.copy

    def begin(self, block_tokens: int, now_s: float, shared: SharedBlocks) -> None:
        """Take up the next round."""
        index = self.index
        if index < 0:
            append, self.gen = SYNTHETIC_ROUND_TOKENS, SYNTHETIC_ROUND_GEN
        else:
            append, self.gen = self.script.appends[index], self.script.gens[index]
        prompt = self.prompt = self.context + append
        stored = self.stored
        if self.shares:
            stored = max(stored, shared.tokens(self.script, index))
        # The last token of a prompt is always computed: its logits are the first answer.
        known = stored if stored < prompt else prompt - 1
        self.hit = known - known % block_tokens
        self.left = prompt - self.hit
        self.t_submit = now_s
        self.stage = Stage.QUEUED

    def again(self) -> Agent:
        """The same agent at the beginning of its round; this object is over."""
        fresh = copy.copy(self)
        fresh.stage = Stage.QUEUED
        fresh.pe = fresh.de = None
        fresh.pe_tokens = fresh.de_tokens = fresh.pooled = 0
        fresh.left = self.prompt - self.hit
        self.stage = Stage.QUEUED
        self.index = _OVER
        return fresh

    def end(self) -> float | None:
        """Close the round; the tool's latency before the next one, None when there is none."""
        context = self.context = self.prompt + self.gen
        # The KV of the last token of an answer is never computed.
        self.stored = context - 1 if self.gen else context
        index = self.index
        self.index = index + 1
        self.t_submit = math.inf  # nothing is under way
        if self.index >= self.script.rounds:
            return None
        latencies = self.script.latencies
        return latencies[index] if latencies is not None and index >= 0 else 0.0


def arrivals(plan: Plan, scripts: Scripts) -> Iterator[tuple[float, int]]:
    """Second and script number of every agent that will ever come, in order."""
    rng = random.Random(f"arrivals:{plan.seed}")
    if plan.aps is None:
        for number in range(plan.agents if plan.agents is not None else scripts.all()):
            yield 0.0, number
        return
    count = scripts.all()
    order = list(range(count))
    rng.shuffle(order)
    at_s, number = 0.0, 0
    while plan.agents is None or number < plan.agents:
        at_s += rng.expovariate(plan.aps)
        yield at_s, order[number % count] + number // count * count
        number += 1
