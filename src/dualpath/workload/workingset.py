"""How much KV the agents that are not over keep alive.

An agent's context is needed from its arrival to its last answer. By Little's law, with ``aps``
agents arriving a second the mean tokens kept are ``aps * E[sum over rounds of context * time]``,
where a round's context is its prompt and its time is service and tool latency. Longer tools make
agents live longer, so the set grows with the latency; and the longer a context lies between two
uses, the more of others passes through a cache before it is used again, which is what decides
whether a DRAM tier of some size still holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dualpath.workload.trace import Trajectory


@dataclass(frozen=True, slots=True)
class Service:
    """How long the system takes for a round.

    Attributes:
        ttft_s: to the first token.
        tpot_s: for each further token.
    """

    ttft_s: float
    tpot_s: float

    def round_s(self, gen_tokens: int) -> float:
        """A round's time; none for a round that asks nothing."""
        return self.ttft_s + max(0, gen_tokens - 1) * self.tpot_s if gen_tokens else 0.0


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """Means over the agents alive at a random moment.

    Attributes:
        aps: agents arriving a second.
        agents: alive.
        tokens: of their contexts.
        serving_tokens: those of rounds that are being served, not waiting for a tool.
        jct_s: mean life of an agent.
        tool_share: part of their lives that agents wait for tools.
        reuse_s: mean time from the start of a round to the start of the next one.
    """

    aps: float
    agents: float
    tokens: float
    serving_tokens: float
    jct_s: float
    tool_share: float
    reuse_s: float

    def bytes(self, kv_bytes_per_token: int) -> float:
        """Its size."""
        return self.tokens * kv_bytes_per_token

    def to_json(self) -> dict[str, Any]:
        """As plain objects."""
        return asdict(self)


def working_set(trajectories: Iterable[Trajectory], service: Service, aps: float) -> WorkingSet:
    """One pass over ``trajectories``; constant memory.

    Args:
        trajectories: what agents do; each is equally likely to arrive.
        service: assumed the same for all rounds, whatever the load: take it from a measurement or
            a simulation at this load.
        aps: agents arriving a second.

    Raises:
        ValueError: no trajectories, or ``aps`` is not above 0.
    """
    if not 0 < aps < math.inf:
        raise ValueError(f"aps: must be above 0, got {aps}")
    count = gaps = 0
    token_s = serving_token_s = life_s = tool_s = gap_s = 0.0
    for trajectory in trajectories:
        count += 1
        for item, prompt in zip(trajectory.rounds, trajectory.prompts_tokens(), strict=True):
            served = service.round_s(item.gen_tokens)
            waiting = item.tool_latency_s or 0.0
            token_s += prompt * served + (prompt + item.gen_tokens) * waiting
            serving_token_s += prompt * served
            life_s += served + waiting
            tool_s += waiting
            gap_s += served + waiting
            gaps += 1
        last = trajectory.rounds[-1]  # nothing is waited for after it
        gap_s -= service.round_s(last.gen_tokens) + (last.tool_latency_s or 0.0)
        gaps -= 1
    if not count:
        raise ValueError("there are no trajectories")
    return WorkingSet(
        aps=aps,
        agents=aps * life_s / count,
        tokens=aps * token_s / count,
        serving_tokens=aps * serving_token_s / count,
        jct_s=life_s / count,
        tool_share=tool_s / life_s if life_s else 0.0,
        reuse_s=gap_s / gaps if gaps else 0.0,
    )
