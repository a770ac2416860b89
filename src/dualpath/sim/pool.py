"""A comparator: KV kept in the DRAM of prefill nodes between rounds, as SGLang with Mooncake does.

A model of that design, not a measurement of it: every prefill node has a pool; what a round leaves
stays in the pool of the node that prefilled it, the least recently used agent goes first; the next
round of an agent goes to the node that has most of its KV, unless that node has twice as many
requests as the least loaded one; what is not in the pool is read from storage by that node.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from dualpath.sim.load import Agent
from dualpath.sim.nodes import Node, PrefillEngine

_TOO_BUSY: Final = 2.0
_FEW: Final = 4
"""Requests of a node that are too few to call it busy."""


class Pools:
    """The pools of all prefill nodes, and who has how much to do."""

    def __init__(
        self, engines: Iterable[PrefillEngine], capacity_bytes: float, token_bytes: int
    ) -> None:
        self._capacity = int(capacity_bytes / token_bytes)
        self._kept: dict[str, OrderedDict[str, int]] = {}
        self._tokens: dict[str, int] = {}
        self._engines: dict[str, list[PrefillEngine]] = {}
        self._homes: dict[str, Node] = {}
        self._load: dict[str, int] = {}
        for engine in engines:
            node = engine.node.name
            self._kept.setdefault(node, OrderedDict())
            self._tokens.setdefault(node, 0)
            self._engines.setdefault(node, []).append(engine)
            self._load[engine.name] = 0

    def route(self, agent: Agent, proposed: PrefillEngine) -> tuple[PrefillEngine, int]:
        """The PE for a round, and how many of its hit tokens lie in that node's pool."""
        home = self._homes.get(agent.rid)
        node = proposed.node
        if home is not None and home.alive:
            least = min(self._node_load(name) for name in self._engines)
            load = self._node_load(home.name)
            if load <= _FEW or load <= _TOO_BUSY * least:
                node = home
        engine = min(self._engines[node.name], key=lambda one: self._load[one.name])
        self._load[engine.name] += 1
        kept = self._kept[node.name]
        tokens = kept.get(agent.rid, 0)
        if tokens:
            kept.move_to_end(agent.rid)
        return engine, min(tokens, agent.hit)

    def leave(self, agent: Agent, engine: PrefillEngine) -> None:
        """A PE is done with a round: its KV stays on that node."""
        self._load[engine.name] -= 1
        node = engine.node
        old = self._homes.get(agent.rid)
        if old is not None and old is not node:
            self.forget(agent)
        self._homes[agent.rid] = node
        kept = self._kept[node.name]
        tokens = agent.prompt + agent.gen
        self._tokens[node.name] += tokens - kept.pop(agent.rid, 0)
        kept[agent.rid] = tokens
        while self._tokens[node.name] > self._capacity:
            rid, freed = kept.popitem(last=False)
            self._tokens[node.name] -= freed
            del self._homes[rid]

    def forget(self, agent: Agent) -> None:
        """An agent is over."""
        home = self._homes.pop(agent.rid, None)
        if home is not None:
            self._tokens[home.name] -= self._kept[home.name].pop(agent.rid, 0)

    def check_integrity(self) -> None:
        """Raises AssertionError when a pool's count is off or above its capacity."""
        for node, kept in self._kept.items():
            assert self._tokens[node] == sum(kept.values()) <= self._capacity, f"pool of {node}"
            assert all(self._homes[rid].name == node for rid in kept), f"homes of {node}"

    def _node_load(self, node: str) -> int:
        return sum(self._load[engine.name] for engine in self._engines[node])
