"""A node dies: what it held is gone, and the requests on it are sent again."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING

from dualpath.sim.load import Agent, Stage
from dualpath.sim.nodes import DecodeEngine, Node, PrefillEngine

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation


def fail_node(sim: Simulation, node: Node) -> None:
    """Kill a node now and send again what was on it, each request from its beginning.

    Storage has lost nothing. TTFT counts from the first time a request was sent.
    """
    if not node.alive:
        return
    node.alive = False
    engines: list[PrefillEngine | DecodeEngine] = []
    engines.extend(one for one in sim.cluster.prefill.values() if one.node is node)
    engines.extend(one for one in sim.cluster.decode.values() if one.node is node)
    dropped: list[str] = []
    for engine in engines:
        dropped.extend(sim.scheduler.remove_engine(engine.name))
    for rid in dropped:
        _take_back(sim, sim.agents[rid])
    for engine in engines:
        if isinstance(engine, PrefillEngine):
            _leave_prefill(engine)
        else:
            _leave_decode(sim, engine)
    node.reads.clear()
    group = node.fetch_group
    group.nodes.remove(node)
    if not group.nodes:
        sim.fetching.drop(group)
    for rid in dropped:
        sim.resubmit(rid)


def _take_back(sim: Simulation, agent: Agent) -> None:
    """Free what a round holds, wherever it is."""
    pe, de = agent.pe, agent.de
    if pe is None or de is None:
        return
    stage = agent.stage
    if stage == Stage.WAITS_DE:
        _leave_line(de.node, agent)
    elif stage == Stage.WAITS_PE:
        _leave_line(pe.node, agent)
        _give_back(sim, de.node, agent.need_bytes)
    elif stage == Stage.PREFILL:
        group = pe.step_group
        _drop(group.ready, lambda item: item[2] is agent)
        if agent in pe.queue:
            pe.queue.remove(agent)
            group.queued -= 1
        group.batch = [item for item in group.batch if item[1] is not agent]
        if sim.transfers:
            _give_back(sim, de.node, agent.need_bytes)
            _give_back(sim, pe.node, (agent.pe_tokens - agent.pooled) * sim.token_bytes)
    elif stage == Stage.DECODE:
        _drop(de.step_group.ends, lambda item: item[2] is agent)
        sim.decode.leave(de, agent)


def _give_back(sim: Simulation, node: Node, size_bytes: float) -> None:
    if node.alive:
        sim.staging.give_back(node, size_bytes)


def _leave_line(node: Node, agent: Agent) -> None:
    waiting = node.buffer.waiting
    for item in waiting:
        if item[1] is agent:
            waiting.remove(item)
            return


def _drop(
    heap: list[tuple[float, int, Agent]], gone: Callable[[tuple[float, int, Agent]], bool]
) -> None:
    kept = [item for item in heap if not gone(item)]
    if len(kept) != len(heap):
        heap[:] = kept
        heapq.heapify(heap)


def _leave_prefill(engine: PrefillEngine) -> None:
    group = engine.step_group
    group.engines.remove(engine)
    group.speed -= engine.speed


def _leave_decode(sim: Simulation, engine: DecodeEngine) -> None:
    group = engine.step_group
    sim.decode.advance(group)
    group.engines.remove(engine)
    group.levels[engine.seqs] -= 1
    group.seqs -= engine.seqs
    if group.engines:
        group.slowdown = 1.0 / min(one.speed for one in group.engines)
        sim.decode.retime(group)
        sim.decode.plan(group)


def plan_failures(sim: Simulation) -> None:
    """Put every failure of the spec into the event queue."""
    nodes = {node.name: node for node in sim.cluster.nodes}
    for name, at_s in sim.spec.cluster.failures:
        sim.at(at_s, lambda node: fail_node(sim, node), nodes[name])
