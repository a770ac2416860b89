"""Nodes that change roles during a run: drain, reload, join the other side.

A machine has two faces, a prefill node and a decode node, of which at most one is alive. Its
original face has the node's own name, the other one that of the machine and the role.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dualpath.config import Role
from dualpath.scheduler.roles import RoleBalance, RoleLoad
from dualpath.sim.build import chunks, engine_spec, miss_tokens_per_s
from dualpath.sim.failure import fail_node
from dualpath.sim.nodes import (
    DecodeEngine,
    DecodeGroup,
    FetchGroup,
    Node,
    PrefillEngine,
    PrefillGroup,
)
from dualpath.sim.spec import RolesSpec

if TYPE_CHECKING:
    from dualpath.sim.core import Simulation

_POLL_S: Final = 0.5
"""Between two looks at a node that drains."""
_OTHER: Final = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


@dataclass(slots=True)
class _Face:
    node: Node
    engines: list[PrefillEngine | DecodeEngine]


@dataclass(slots=True)
class _Machine:
    name: str
    role: Role
    faces: dict[Role, _Face]


class RoleChanges:
    """Looks at the load every ``check_s`` and has nodes change their role; one change at a time."""

    def __init__(self, simulation: Simulation, spec: RolesSpec) -> None:
        self._sim = simulation
        self._spec = spec
        self._policy = RoleBalance(spec.reload_s)
        self._machines: list[_Machine] = []
        engines: list[PrefillEngine | DecodeEngine] = [
            *simulation.cluster.prefill.values(),
            *simulation.cluster.decode.values(),
        ]
        for node in simulation.cluster.nodes:
            mine = [one for one in engines if one.node is node]
            self._machines.append(_Machine(node.name, node.role, {node.role: _Face(node, mine)}))
        self._moving = 0
        self._served = 0
        self._served_s = 0.0
        engine, cluster = simulation.spec.engine, simulation.spec.cluster
        self._node_rate = miss_tokens_per_s(simulation.spec) * cluster.gpus_per_node
        self._gpus = cluster.gpus_per_node
        self._engine = engine

    def start(self) -> None:
        """Plan the first look."""
        self._sim.at(self._sim.now_s + self._spec.check_s, self._check, None)

    # ---- when ----------------------------------------------------------------------------------

    def _check(self, _: None) -> None:
        sim = self._sim
        if not sim.busy:
            return
        if not self._moving:
            served = sim.metrics.requests - self._served
            since_s = sim.now_s - self._served_s
            self._served, self._served_s = sim.metrics.requests, sim.now_s
            if served:
                # Little's law, with everybody who is not over under way.
                round_s = len(sim.agents) * since_s / served
                loads = self._loads(served / since_s)
                move = self._policy.decide(sim.now_s, *loads, round_s)
                if move:
                    self._leave(Role.DECODE if move > 0 else Role.PREFILL, abs(move))
        self.start()

    def _loads(self, served_per_s: float) -> tuple[RoleLoad, RoleLoad]:
        """Delays by what is on the engines now: the computation ahead on the PEs; on the DEs the
        time that a step takes longer because of others, and the wait for memory."""
        sim = self._sim
        snapshot, metrics = sim.scheduler.snapshot(), sim.metrics
        nodes = dict.fromkeys(Role, 0)
        for machine in self._machines:
            nodes[machine.role] += machine.faces[machine.role].node.alive
        ahead = sum(agent.left for agent in sim.agents.values())
        prefill_s = ahead / (self._node_rate * nodes[Role.PREFILL])
        decoding = sum(engine.seqs for engine in sim.cluster.decode.values())
        seqs = decoding / (nodes[Role.DECODE] * self._gpus)
        decode_s = metrics.mean_gen * self._engine.decode_added_s(seqs)
        decode_s += snapshot.waiting_decode / served_per_s
        return RoleLoad(nodes[Role.PREFILL], prefill_s), RoleLoad(nodes[Role.DECODE], decode_s)

    # ---- away ----------------------------------------------------------------------------------

    def _leave(self, role: Role, count: int) -> None:
        """Drain the nodes of a role that have least to do."""
        sim = self._sim
        tokens = {one.name: one.tok for one in sim.scheduler.snapshot().engines}
        mine = [one for one in self._machines if one.role is role]
        mine.sort(key=lambda one: sum(tokens[engine.name] for engine in one.faces[role].engines))
        self._moving = count
        for machine in mine[:count]:
            for engine in machine.faces[role].engines:
                sim.scheduler.drain(engine.name)
            self._poll(machine)

    def _poll(self, machine: _Machine) -> None:
        sim = self._sim
        face = machine.faces[machine.role]
        names = {engine.name for engine in face.engines}
        if any(one.seq for one in sim.scheduler.snapshot().engines if one.name in names):
            sim.at(sim.now_s + _POLL_S, self._poll, machine)
            return
        fail_node(sim, face.node)  # which has nothing to lose any more
        if sim.timeline is not None:
            end_s = sim.now_s + self._spec.reload_s
            sim.timeline.span("roles", machine.name, "reload", sim.now_s, end_s)
        sim.at(sim.now_s + self._spec.reload_s, self._join, machine)

    # ---- and back ------------------------------------------------------------------------------

    def _join(self, machine: _Machine) -> None:
        sim, now = self._sim, self._sim.now_s
        old = machine.faces[machine.role].node
        role = machine.role = _OTHER[machine.role]
        face = machine.faces.get(role)
        if face is None:
            face = machine.faces[role] = self._new_face(machine, old)
        node = face.node
        node.alive = True
        node.read_free_s, node.write_free_s = old.read_free_s, old.write_free_s
        group = FetchGroup(f"{role.value}-{machine.name}", role, [node], now)
        group.told_s = now
        for engine in face.engines:
            sim.scheduler.add_engine(engine_spec(sim.spec, engine))
        self._join_steps(face.engines)
        sim.fetching.add(group)
        sim.metrics.role_switches.append((now, machine.name, role.value))
        self._policy.forget()
        self._served, self._served_s = sim.metrics.requests, now
        self._moving -= 1

    def _new_face(self, machine: _Machine, old: Node) -> _Face:
        cluster, spec = self._sim.cluster, self._sim.spec.cluster
        name = f"{machine.name}.{machine.role.value}"
        prefill = machine.role is Role.PREFILL
        size = spec.pe_buffer_bytes if prefill else spec.de_buffer_bytes
        node = Node(name, len(cluster.nodes), machine.role, old.rate, size)
        cluster.nodes.append(node)
        engines: list[PrefillEngine | DecodeEngine] = []
        speed = spec.compute_scale.get(machine.name, 1.0)
        for local in range(self._gpus):
            if prefill:
                engines.append(PrefillEngine(f"{name}-{local}", node, speed))
            else:
                engines.append(DecodeEngine(f"{name}-{local}", node, speed))
        return _Face(node, engines)

    def _join_steps(self, engines: list[PrefillEngine | DecodeEngine]) -> None:
        """Into the smallest group whose nodes step together, or as groups of their own."""
        sim, spec = self._sim, self._sim.spec.cluster
        prefill = [one for one in engines if isinstance(one, PrefillEngine)]
        decode = [one for one in engines if isinstance(one, DecodeEngine)]
        if prefill:
            together = spec.prefill_lockstep > self._gpus
            groups = {one.step_group for one in sim.cluster.prefill.values()} if together else ()
            group = min((g for g in groups if g.engines), key=lambda g: (len(g.engines), g.name),
                        default=None)  # fmt: skip
            if group is None:
                for index, part in enumerate(chunks(prefill, spec.prefill_lockstep)):
                    PrefillGroup(f"PE group {prefill[0].node.name} {index}", part)
            else:
                for one in prefill:
                    sim.prefill.join(group, one)
            sim.cluster.prefill.update({one.name: one for one in prefill})
        if decode:
            together = spec.decode_lockstep > self._gpus
            others = {one.step_group for one in sim.cluster.decode.values()} if together else ()
            found = min((g for g in others if g.engines), key=lambda g: (len(g.engines), g.name),
                        default=None)  # fmt: skip
            if found is None:
                for index, members in enumerate(chunks(decode, spec.decode_lockstep)):
                    DecodeGroup(f"DE group {decode[0].node.name} {index}", members)
            else:
                for member in decode:
                    sim.decode.join(found, member)
            sim.cluster.decode.update({member.name: member for member in decode})
