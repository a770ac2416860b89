"""Recounts every figure of the scheduler from the requests themselves.

For tests and the debug endpoint: O(everything). Each function raises AssertionError naming what is
off and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from dualpath.config import Role
from dualpath.scheduler.cluster import Cluster
from dualpath.scheduler.queues import Queues
from dualpath.scheduler.state import Engine, Entry, Group, Node


def check(cluster: Cluster, queues: Queues, entries: Mapping[str, Entry]) -> None:
    """Check everything."""
    for engine in cluster.engines.values():
        _check_engine(engine)
    for node in cluster.nodes.values():
        _check_node(node)
    for group in cluster.groups.values():
        _check_group(group)
    _check_requests(cluster, queues, entries)


def _check_engine(engine: Engine) -> None:
    name, holds = engine.name, list(engine.holds.values())
    half = [hold for hold in holds if not hold.delivered]
    new = [hold for hold in holds if not hold.delivered or hold.epoch == engine.epoch]
    assert engine.half_tok == sum(hold.entry.tokens for hold in half), f"half_tok of {name}"
    assert engine.half_seq == len(half), f"half_seq of {name}"
    new_tok = sum(hold.entry.tokens for hold in new)
    assert engine.tok == engine.known_tok + new_tok >= new_tok, f"tok of {name}"
    assert engine.seq == engine.known_seq + len(new) >= len(new), f"seq of {name}"
    computes = sum(hold.entry.miss for hold in holds) if engine.role is Role.PREFILL else 0
    assert engine.miss == computes, f"miss of {name}"
    assert engine.promised == sum(hold.need for hold in holds), f"promised of {name}"
    assert engine.promised <= engine.capacity, f"HBM of {name} is over-committed"
    claimed = max(engine.promised, engine.used)
    assert engine.free == max(0, engine.capacity - claimed), f"free HBM of {name}"


def _check_node(node: Node) -> None:
    holds = [hold for engine in node.engines.values() for hold in engine.holds.values()]
    reads = [hold for hold in holds if hold.read]
    new = sum(hold.read for hold in reads if hold.read_epoch == node.epoch)
    assert node.readers == len(reads), f"readers of {node.name}"
    assert node.read_q == node.known + new >= new, f"read queue of {node.name}"


def _check_group(group: Group) -> None:
    name = group.name
    active = [engine for engine in group.engines.values() if engine.active]
    assert group.active == active, f"active engines of {name}"
    assert group.tok == sum(engine.tok for engine in active), f"tok of {name}"
    assert group.miss == sum(engine.miss for engine in active), f"miss of {name}"
    assert group.free == sum(engine.free for engine in active), f"free HBM of {name}"
    queued = list(group.queue.values())
    assert group.queued == sum(entry.tokens for entry in queued), f"queued tokens of {name}"
    assert active or not queued, f"{name} has a queue and no engine"
    assert all(entry.need <= group.largest for entry in queued), f"{name} cannot hold its queue"


def _check_requests(cluster: Cluster, queues: Queues, entries: Mapping[str, Entry]) -> None:
    private = [group.queue for group in cluster.groups.values()]
    for rid, entry in entries.items():
        waits = sum(rid in queue for queue in (queues.arrived, queues.parked, *private))
        assert entry.complete or (entry.prefill is None) == (rid in queues.fifo), f"PE of {rid}"
        assert waits == (entry.decode is None), f"{rid} waits for a DE in {waits} places"
        assert (entry.group is not None) == any(rid in queue for queue in private), rid
        assert not entry.complete or entry.decode is not None, f"{rid} lost its DE"
        for hold in (entry.prefill, entry.decode):
            assert hold is None or hold.engine.holds.get(rid) is hold, f"hold of {rid}"
            assert hold is None or hold.delivered == entry.complete, f"delivery of {rid}"
    every = [queues.fifo, queues.arrived, queues.parked, *private]
    held = {rid for engine in cluster.engines.values() for rid in engine.holds}
    known = entries.keys()
    assert held | {rid for queue in every for rid in queue} <= known, "held by no request"
    for queue in every:
        arrivals = [entry.arrival for entry in queue.values()]
        assert arrivals == sorted(arrivals), "a queue is out of order"
