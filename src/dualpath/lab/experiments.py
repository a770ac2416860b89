"""What the lab runs, by name. Pure: clusters, traces and modes, nothing started.

Every measured run begins with an empty store and asks only for contexts that a warm-up has put
there: each agent's first round, sent alone and with one token of answer. The warm-up's times and
bytes do not count. The measured rounds then find nearly all of every prompt in storage, as agents
do that have talked for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from dualpath.config import Mode
from dualpath.workload.trace import Round, Trajectory

RUN_LIMIT_S: Final = 900.0
"""Most time for a run's agents once they have all come. Runs take a minute."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a cluster is run: its mode, and a scheduler policy other than the mode's own if any.

    Attributes:
        name: key in results.
        mode: of the cluster.
        policy: name of a policy set; empty for the mode's own.
    """

    name: str
    mode: Mode
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Shape:
    """What every agent of a run does.

    Attributes:
        agents: how many.
        context_tokens: stored before the run is measured.
        turns: measured rounds.
        append_tokens, gen_tokens: of every measured round.

    Raises:
        ValueError: a figure is below 1.
    """

    agents: int
    context_tokens: int
    turns: int
    append_tokens: int
    gen_tokens: int

    def __post_init__(self) -> None:
        for name in ("agents", "context_tokens", "turns", "append_tokens", "gen_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def warm_up(self) -> list[Trajectory]:
        """Stores every agent's context."""
        return self._agents((Round(self.context_tokens, 1, None),))

    def measured(self) -> list[Trajectory]:
        """The same contexts, told but not sent again, and the rounds that count."""
        one = Round(self.append_tokens, self.gen_tokens, 0.0)
        last = Round(self.append_tokens, self.gen_tokens, None)
        told = Round(self.context_tokens, 0, 0.0)
        return self._agents((told, *[one] * (self.turns - 1), last))

    def _agents(self, rounds: tuple[Round, ...]) -> list[Trajectory]:
        return [Trajectory(f"agent-{number}", rounds) for number in range(self.agents)]

    def hit_tokens(self, block_tokens: int) -> int:
        """Prompt tokens of all measured rounds that are stored: whole blocks of everything before
        the round."""
        turn_tokens = self.append_tokens + self.gen_tokens
        before = (self.context_tokens + turn * turn_tokens for turn in range(self.turns))
        return self.agents * sum(tokens // block_tokens * block_tokens for tokens in before)

    @property
    def prompt_tokens(self) -> int:
        """Of all measured rounds."""
        turn_tokens = self.append_tokens + self.gen_tokens
        first = self.context_tokens + self.append_tokens
        return self.agents * sum(first + turn * turn_tokens for turn in range(self.turns))

    def hit_ratio(self, block_tokens: int) -> float:
        """Stored part of all prompt tokens."""
        return self.hit_tokens(block_tokens) / self.prompt_tokens

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its answer."""
        return self.context_tokens + self.turns * (self.append_tokens + self.gen_tokens)


@dataclass(frozen=True, slots=True)
class Case:
    """Runs that are compared with each other: one cluster, one trace and seed, several variants.

    Attributes:
        name: unique in the experiment.
        prefill, decode: nodes.
        shape: what agents do.
        variants: run one after the other, in the opposite order every other time.
        repeats: runs of each.
        aps: agents arriving a second, Poisson; None: all at once.
        seed: of prompts and arrivals.
        storage_limits: whether storage is the limit by design; where not, dualpath is to come near
            oracle.
    """

    name: str
    prefill: int
    decode: int
    shape: Shape
    variants: tuple[Variant, ...]
    repeats: int = 3
    aps: float | None = None
    seed: int = 0
    storage_limits: bool = True

    def variant(self, name: str) -> Variant:
        """The variant called ``name``, which must be there."""
        return next(one for one in self.variants if one.name == name)

    def order(self, repeat: int) -> Sequence[Variant]:
        """The variants in the order of a repeat: what else the machine does meets all alike."""
        return self.variants if repeat % 2 == 0 else self.variants[::-1]

    @property
    def limit_s(self) -> float:
        """Most time of a run, after which it is stopped: a rate of arrivals that cannot be served
        has no end of its own. Arrivals come late by chance, hence twice their time."""
        return RUN_LIMIT_S + (2 * self.shape.agents / self.aps if self.aps is not None else 0.0)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A question and the cases that answer it.

    Attributes:
        name: on the command line.
        title: for people.
        cases: in order; those of one cluster stand together, so that it is started once.
        snic_mbit, cnic_mbit: rates of a node's NICs unless told otherwise: one to eight, as a node
            of eight GPUs with a NIC each has it.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    snic_mbit: float = 50.0
    cnic_mbit: float = 400.0

    def with_repeats(self, repeats: int) -> Experiment:
        """The same with another number of repeats.

        Raises:
            ValueError: it is below 1.
        """
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        return replace(self, cases=tuple(replace(case, repeats=repeats) for case in self.cases))


BASIC: Final = Variant("basic", Mode.BASIC)
PE_ONLY: Final = Variant("pe-only", Mode.PE_ONLY)
DUALPATH: Final = Variant("dualpath", Mode.DUALPATH)
SPLIT: Final = Variant("split", Mode.SPLIT)
ORACLE: Final = Variant("oracle", Mode.ORACLE)
ALL_MODES: Final = (BASIC, PE_ONLY, DUALPATH, SPLIT, ORACLE)
ABLATION: Final = (
    BASIC,
    Variant("layerwise", Mode.PE_ONLY, "basic"),
    # Engines in turn and paths in turn. A node of the lab has one engine, so that each needs a turn
    # of its own: else one of two decode nodes would read and the other not.
    Variant("alternating", Mode.DUALPATH, "round_robin/round_robin/alternating_by_node"),
    DUALPATH,
)
"""Each adds one thing to the one before: layer by layer, the second path, the scheduler."""

_SHORT: Final = Shape(agents=6, context_tokens=1536, turns=4, append_tokens=64, gen_tokens=8)
_USUAL: Final = replace(_SHORT, gen_tokens=16)
_PAIR: Final = (BASIC, DUALPATH)


def _ratio(prefill: int, decode: int) -> Case:
    # As many agents as keep every NIC's queue filled.
    shape = replace(_USUAL, agents=3 * (prefill + decode))
    return Case(f"{prefill}p{decode}d", prefill, decode, shape, ALL_MODES)


def _scaled(field: str, values: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(f"{field.removesuffix('_tokens')}-{value}", 1, 1,
             replace(_USUAL, **{field: value}), _PAIR)
        for value in values
    )  # fmt: skip


EXPERIMENTS: Final[Mapping[str, Experiment]] = MappingProxyType(
    {
        experiment.name: experiment
        for experiment in (
            Experiment(
                "smoke",
                "One prefill and one decode node: does the second path pay?",
                (
                    Case(
                        "1p1d",
                        1,
                        1,
                        replace(_SHORT, turns=3, gen_tokens=4),
                        (PE_ONLY, DUALPATH),
                        repeats=1,
                    ),
                ),
                # Half the usual rates and short answers: it is to tell the same on a busy machine.
                snic_mbit=25.0,
                cnic_mbit=200.0,
            ),
            Experiment(
                "pd-ratio",
                "Every mode at several ratios of prefill to decode nodes",
                (_ratio(1, 1), _ratio(1, 2), _ratio(2, 1)),
            ),
            Experiment("agents", "More agents", _scaled("agents", (1, 2, 4, 8, 16))),
            Experiment("append", "Longer appends", _scaled("append_tokens", (32, 128, 256))),
            Experiment("generation", "Longer answers", _scaled("gen_tokens", (4, 16, 64))),
            Experiment(
                "ablation",
                "One thing after the other",
                (Case("1p2d", 1, 2, replace(_USUAL, agents=9), ABLATION),),
            ),
            Experiment(
                "oracle",
                "Storage fast enough: how near to moving nothing at all?",
                (
                    Case(
                        "1p1d",
                        1,
                        1,
                        # Reading 3 MB takes 0.06 s of such a NIC, and 560 steps take seconds: as
                        # in the paper, where an answer takes longer than its KV by two orders.
                        Shape(
                            agents=2, context_tokens=768, turns=2, append_tokens=16, gen_tokens=560
                        ),
                        (PE_ONLY, DUALPATH, ORACLE),
                        storage_limits=False,
                    ),
                ),
                snic_mbit=400.0,
            ),
            Experiment(
                "online",
                "Agents that arrive one by one",
                tuple(
                    Case(f"aps-{aps:g}", 1, 1, replace(_USUAL, agents=12), _PAIR, aps=aps)
                    for aps in (0.05, 0.1, 0.2, 0.4)
                ),
            ),
        )
    }
)
ISOLATION: Final = "isolation"
"""The experiment without engines; see ``lab.isolation``."""
