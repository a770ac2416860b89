"""The bottleneck-free range of P/D: ratios of prefill to decode nodes at which no compute NIC and
no memory is full before all storage NICs are (arXiv 2602.21548, section 4.2).

Twice: by closed forms, generalised to kinds of nodes that differ, and by adding up traffic link by
link. The closed forms for equal nodes with ``s = SNIC / CNIC``, ``M`` memory, ``S`` the SNIC:
``s/(g-s) <= P/D <= min((g-2s)/s, (g-s)/(2s), (M/S - 3)/2)``, where also ``s <= g/2`` (PE CNIC
read) and ``2 S <= M`` (PE memory). The paper prints the former of these two as ``s <= g``; its own
premise ``2 B s / g <= B`` gives half of that. With one SNIC as fast as a CNIC both hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from dualpath.plan.traffic import DE_LINKS, PE_LINKS, Extra, Link, Load, Node, loads

_SATURATED: Final = (Link.PE_SNIC, Link.DE_SNIC)


@dataclass(frozen=True, slots=True)
class Bound:
    """What one link allows.

    Attributes:
        link: the link.
        least, most: P/D must lie between them (inclusive); None where the link does not care.
        possible: False when the link is too slow at every ratio.
    """

    link: Link
    least: Fraction | None = None
    most: Fraction | None = None
    possible: bool = True


@dataclass(frozen=True, slots=True)
class RatioRange:
    """The range and where it comes from.

    Attributes:
        bounds: one for each link that can be a bottleneck.
        least, most: the range, both ends in it, as far as links that allow some ratio go.
        least_by, most_by: links that set them, more than one when they tie.
    """

    bounds: tuple[Bound, ...]
    least: Fraction
    most: Fraction
    least_by: tuple[Link, ...]
    most_by: tuple[Link, ...]

    @property
    def empty(self) -> bool:
        """Whether no ratio is free of bottlenecks."""
        return bool(self.impossible) or self.least > self.most

    @property
    def impossible(self) -> tuple[Link, ...]:
        """Links too slow at every ratio."""
        return tuple(bound.link for bound in self.bounds if not bound.possible)

    def __contains__(self, ratio: Fraction) -> bool:
        """Whether ``ratio`` of prefill to decode nodes is free of bottlenecks."""
        return not self.empty and self.least <= ratio and (self.most is None or ratio <= self.most)


def closed_form(prefill: Node, decode: Node) -> RatioRange:
    """The range by formula, for nodes that are equal within their kind."""
    read, hits = prefill.snic_gbs, decode.snic_gbs
    pe_network, de_network = prefill.gpus * prefill.cnic_gbs, decode.gpus * decode.cnic_gbs
    spare = pe_network - read
    return _combine(
        (
            Bound(Link.PE_CNIC_READ, possible=2 * read <= pe_network),
            Bound(Link.PE_CNIC_WRITE, least=hits / spare)
            if spare > 0
            else Bound(Link.PE_CNIC_WRITE, possible=False),
            Bound(Link.PE_DRAM, possible=2 * read <= prefill.memory_gbs),
            _at_most(Link.DE_CNIC_READ, de_network - 2 * hits, read),
            _at_most(Link.DE_CNIC_WRITE, de_network - hits, 2 * read),
            _at_most(Link.DE_DRAM, decode.memory_gbs - 3 * hits, 2 * read),
        )
    )


def by_traffic(prefill: Node, decode: Node, extra: Extra | None = None) -> RatioRange:
    """The range by adding up what crosses each link, further traffic included.

    A kind's total load on a link is ``p * P + d * D`` (each node of either kind reads at its own
    SNIC's rate), so the loads of two clusters give ``p`` and ``d``, and these the ratio at which
    the link is exactly full.
    """
    few, many = _totals(prefill, decode, 1, extra), _totals(prefill, decode, 2, extra)
    bounds = []
    for link in (*PE_LINKS, *DE_LINKS):
        if link in _SATURATED:  # full by assumption
            continue
        per_prefill = many[link] - few[link]
        per_decode = few[link] - per_prefill
        node = prefill if link in PE_LINKS else decode
        capacity = node.capacity_gbs(link)
        if link in PE_LINKS:
            room = capacity - per_prefill
            if per_decode == 0:
                bounds.append(Bound(link, possible=room >= 0))
            elif room > 0:
                bounds.append(Bound(link, least=per_decode / room))
            else:
                bounds.append(Bound(link, possible=False))
        elif per_prefill == 0:
            bounds.append(Bound(link, possible=per_decode <= capacity))
        else:
            bounds.append(_at_most(link, capacity - per_decode, per_prefill))
    return _combine(tuple(bounds))


def _totals(
    prefill: Node, decode: Node, prefill_nodes: int, extra: Extra | None
) -> dict[Link, Fraction]:
    totals: dict[Link, Fraction] = {}
    for load in loads([prefill] * prefill_nodes, [decode], extra):
        totals[load.link] = totals.get(load.link, Fraction(0)) + load.gbs
    return totals


def busiest(found: tuple[Load, ...]) -> Load:
    """The load closest to (or furthest beyond) its link's capacity, the SNICs being full anyway."""
    others = (load for load in found if load.link not in _SATURATED)
    return max(others, key=lambda load: load.utilisation)


def _at_most(link: Link, room: Fraction, per_ratio: Fraction) -> Bound:
    return Bound(link, most=room / per_ratio, possible=room > 0)


def _combine(bounds: tuple[Bound, ...]) -> RatioRange:
    least = max((b.least for b in bounds if b.least is not None), default=Fraction(0))
    most = min(b.most for b in bounds if b.most is not None)
    return RatioRange(
        bounds=bounds,
        least=least,
        most=most,
        least_by=tuple(b.link for b in bounds if b.least == least),
        most_by=tuple(b.link for b in bounds if b.most == most),
    )
