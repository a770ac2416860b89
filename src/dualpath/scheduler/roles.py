"""Which role lacks nodes: a rule that moves nodes between prefill and decode as the load shifts.

Pure, like every policy here: figures and ``now`` in, a decision out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What a request meets on the nodes of one role.

    Attributes:
        nodes: that serve in this role now.
        delay_s: the part of a round's time there that more nodes would shorten in proportion:
            waiting, and being slowed down by others.

    Raises:
        ValueError: a figure is out of range.
    """

    nodes: int
    delay_s: float

    def __post_init__(self) -> None:
        if self.nodes < 1 or not self.delay_s >= 0:
            raise ValueError(
                f"nodes {self.nodes} must be at least 1 and delay_s {self.delay_s} at least 0"
            )

    def with_nodes(self, nodes: int) -> float:
        """The delay that the same requests would meet on ``nodes`` nodes."""
        return self.delay_s * self.nodes / nodes


class RoleBalance:
    """Moves nodes when what was lost by not moving them has reached what moving them costs.

    Of all divisions of the same nodes the best one is that with the least delay in all, as far as
    a delay is inversely proportional to the nodes. What it would save of a round's time is the part
    of the work that is lost each second; it adds up while the best division lies on the same side,
    and begins anew when it does not. While nodes drain and reload they serve nobody: that costs
    ``switch_s`` times what their role suffers without them, and at least ``switch_s`` times their
    share of the cluster, so that noise moves nothing. Thus a load that does not last is not run
    after, and one that lasts is met after as long as the change itself costs: how one decides
    between renting and buying without knowing for how long.
    """

    def __init__(self, switch_s: float) -> None:
        """``switch_s``: how long a node serves nobody when it changes roles; not negative."""
        if not switch_s >= 0:
            raise ValueError(f"switch_s must not be negative, got {switch_s}")
        self._switch_s = switch_s
        self._lost_s = 0.0
        self._to_prefill = True
        self._seen_s: float | None = None

    def decide(self, now_s: float, prefill: RoleLoad, decode: RoleLoad, round_s: float) -> int:
        """How many decode nodes should become prefill nodes now; negative: the other way round;
        0: all stay. A role never loses its last node. O(nodes).

        Args:
            now_s: the caller's clock, which must not go backwards.
            prefill, decode: the load of both roles.
            round_s: mean time of a whole round, above 0.

        After a decision, and after ``forget``, nothing has been lost yet.
        """
        since_s = 0.0 if self._seen_s is None else now_s - self._seen_s
        self._seen_s = now_s
        moves = range(1 - prefill.nodes, decode.nodes)

        def delay_s(move: int) -> float:
            p, d = prefill.nodes + move, decode.nodes - move
            return prefill.with_nodes(p) + decode.with_nodes(d)

        best = min(moves, key=lambda move: (delay_s(move), abs(move)))
        to_prefill = best > 0
        if not best or to_prefill is not self._to_prefill:
            self._lost_s, self._to_prefill = 0.0, to_prefill
            return 0
        self._lost_s += (delay_s(0) - delay_s(best)) / round_s * since_s
        giver = decode if to_prefill else prefill
        suffers = (giver.with_nodes(giver.nodes - abs(best)) - giver.delay_s) / round_s
        share = abs(best) / (prefill.nodes + decode.nodes)
        if not self._lost_s or self._lost_s < self._switch_s * max(suffers, share):
            return 0
        self.forget()
        return best

    def forget(self) -> None:
        """Nothing was lost so far: the division has changed."""
        self._lost_s = 0.0
        self._seen_s = None
