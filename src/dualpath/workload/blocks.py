"""Which prompts begin alike: ids of a prompt's blocks, as a trace records them.

A trajectory may carry ``block`` (tokens of a block) and ``blocks``, one entry a round:
``[kept, [[first id, count], ...]]``. The ids of a round's prompt are the first ``kept`` ids of the
round before, then those of the runs. Equal ids at the same place mean equal tokens up to the end
of that block, in all trajectories of a file. The last block of a prompt may be partly filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dualpath.workload.trace import TraceError, Trajectory


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading entries are equal."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:  # the usual case, fast
        return count
    return next((at for at in range(count) if one[at] != other[at]), count)


def encode_blocks(prompts: Iterable[Sequence[int]]) -> list[list[Any]]:
    """``blocks`` of prompts given by their ids, in order."""
    encoded: list[list[Any]] = []
    before: Sequence[int] = ()
    for ids in prompts:
        kept = common_prefix(before, ids)
        runs: list[list[int]] = []
        for item in ids[kept:]:
            if runs and item == runs[-1][0] + runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([item, 1])
        encoded.append([kept, runs])
        before = ids
    return encoded


def has_blocks(trajectory: Trajectory) -> bool:
    """Whether it says which blocks its prompts have."""
    return "blocks" in trajectory.extra


def block_tokens(trajectory: Trajectory) -> int:
    """Tokens of a block.

    Raises:
        TraceError: missing or wrong.
    """
    size = trajectory.extra.get("block")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise TraceError(f"{trajectory.id}: block: must be a positive integer, got {size!r}")
    return size


def prompt_blocks(trajectory: Trajectory) -> Iterator[list[int]]:
    """Block ids of every round's prompt.

    Raises:
        TraceError: ``blocks`` is not what the module says; names trajectory and round.
    """
    entries = trajectory.extra.get("blocks")
    if not isinstance(entries, list) or len(entries) != len(trajectory.rounds):
        raise TraceError(f"{trajectory.id}: blocks: must have one entry for each round")
    ids: list[int] = []
    for index, entry in enumerate(entries):
        where = f"{trajectory.id}: blocks[{index}]"
        match entry:
            case [int(kept), list(runs)] if 0 <= kept <= len(ids):
                ids = ids[:kept]
            case _:
                raise TraceError(
                    f"{where}: must be [kept, [[first, count], ...]] with kept in 0 .. {len(ids)}"
                )
        for run in runs:
            match run:
                case [int(first), int(count)] if first >= 0 and count >= 1:
                    ids.extend(range(first, first + count))
                case _:
                    raise TraceError(f"{where}: {run!r} is not [first, count]")
        yield list(ids)


@dataclass(slots=True)
class Sharing:
    """Counts what an unbounded cache would hit with trajectories that share blocks.

    Fed with trajectories in the order of their starts; a round finds the blocks of all trajectories
    fed before, and all of its own context. Memory grows with the distinct blocks.

    Attributes:
        prompt_tokens: of all rounds.
        own_tokens: hits on the trajectory's own earlier rounds.
        shared_tokens: hits beyond those, on other trajectories.
        shared_first_tokens: the part of them in first rounds.
    """

    prompt_tokens: int = 0
    own_tokens: int = 0
    shared_tokens: int = 0
    shared_first_tokens: int = 0
    _seen: set[int] = field(default_factory=set, repr=False)

    def feed(self, trajectory: Trajectory) -> None:
        """Count one more.

        Raises:
            TraceError: its blocks make no sense.
        """
        size = block_tokens(trajectory) if has_blocks(trajectory) else 1
        known: Iterable[list[int] | None] = [None] * len(trajectory.rounds)
        if has_blocks(trajectory):
            known = list(prompt_blocks(trajectory))
        own = 0
        new: set[int] = set()
        for index, (item, prompt, ids) in enumerate(
            zip(trajectory.rounds, trajectory.prompts_tokens(), known, strict=True)
        ):
            found = 0
            if ids is not None:
                at = next((n for n, one in enumerate(ids) if one not in self._seen), len(ids))
                found = min(at * size, prompt)
                new.update(ids[: prompt // size])
            shared = max(0, found - own)
            self.prompt_tokens += prompt
            self.own_tokens += own
            self.shared_tokens += shared
            if index == 0:
                self.shared_first_tokens += shared
            own = prompt + item.gen_tokens
        self._seen |= new

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that are hits, own and shared."""
        if not self.prompt_tokens:
            return 0.0
        return (self.own_tokens + self.shared_tokens) / self.prompt_tokens
