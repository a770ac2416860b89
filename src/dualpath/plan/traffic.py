"""What crosses every link of a cluster whose storage NICs all read at full rate.

Flow labels are those of the data flow (arXiv 2602.21548, section 4.1). Hit bytes read by a prefill
node go P1 P2 P4 P5, by a decode node D1 D2 D5; rates are averages. Every prefill node computes, and
every decode node decodes, the same share of all requests, since the scheduler balances tokens.
A copy between a GPU and its own host crosses the GPU's CNIC in both directions (section 5).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final


class Link(enum.Enum):
    """A shared resource of one kind of node. Read: what the node's CNICs take out of its memory
    (host or GPU); write: what they put into it."""

    PE_SNIC = "pe_snic"
    PE_CNIC_READ = "pe_cnic_read"
    PE_CNIC_WRITE = "pe_cnic_write"
    PE_DRAM = "pe_dram"
    DE_SNIC = "de_snic"
    DE_CNIC_READ = "de_cnic_read"
    DE_CNIC_WRITE = "de_cnic_write"
    DE_DRAM = "de_dram"
    DE_SNIC_WRITE = "de_snic_write"


PE_LINKS: Final = (Link.PE_SNIC, Link.PE_CNIC_READ, Link.PE_CNIC_WRITE, Link.PE_DRAM)
DE_LINKS: Final = (
    Link.DE_SNIC, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM, Link.DE_SNIC_WRITE,
)  # fmt: skip

FLOWS: Final[dict[str, tuple[Link, ...]]] = {
    "P1": (Link.PE_SNIC, Link.PE_DRAM),
    "P2": (Link.PE_DRAM, Link.PE_CNIC_READ, Link.PE_CNIC_WRITE),
    "P4": (Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
    "P5": (Link.DE_DRAM, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE),
    "D1": (Link.DE_SNIC, Link.DE_DRAM),
    "D2": (Link.DE_DRAM, Link.DE_CNIC_READ, Link.PE_CNIC_WRITE),
    "D5": (Link.DE_DRAM, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE),
    "miss": (Link.PE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
    "miss_decode": (Link.DE_DRAM, Link.DE_CNIC_READ, Link.DE_CNIC_WRITE),
    "gen": (Link.DE_CNIC_READ, Link.DE_CNIC_WRITE, Link.DE_DRAM),
    "write_back": (Link.DE_DRAM, Link.DE_SNIC_WRITE),
    "pe_collectives": (Link.PE_CNIC_READ, Link.PE_CNIC_WRITE),
    "de_collectives": (Link.DE_CNIC_READ, Link.DE_CNIC_WRITE),
}
"""Which links a byte of each flow crosses. ``miss`` is P4 and D4 for the tokens just computed,
``miss_decode`` their P5 and D5; ``gen`` takes generated KV out of a DE's GPU, ``write_back``
persists it and the misses; collectives stay among the GPUs of one kind."""


@dataclass(frozen=True, slots=True)
class Node:
    """Rates of one node, all in GB/s (1e9 bytes a second), each direction.

    Attributes:
        gpus: engines, each with a CNIC.
        snic_gbs: storage NIC of the node.
        cnic_gbs: compute NIC of one GPU.
        memory_gbs: host memory, reads and writes together.
    """

    gpus: int
    snic_gbs: Fraction
    cnic_gbs: Fraction
    memory_gbs: Fraction

    def __post_init__(self) -> None:
        """Refuse what no machine can be.

        Raises:
            ValueError: naming the field.
        """
        for name in ("gpus", "snic_gbs", "cnic_gbs", "memory_gbs"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")

    def capacity_gbs(self, link: Link) -> Fraction:
        """What ``link`` of this node can move."""
        if link in (Link.PE_SNIC, Link.DE_SNIC, Link.DE_SNIC_WRITE):
            return self.snic_gbs
        if link in (Link.PE_DRAM, Link.DE_DRAM):
            return self.memory_gbs
        return self.gpus * self.cnic_gbs


@dataclass(frozen=True, slots=True)
class Extra:
    """What the paper's bounds leave out, in bytes for each hit byte read from storage.

    Attributes:
        miss: KV of prompt tokens that are computed.
        gen: KV of generated tokens.
        prefill_collectives, decode_collectives: model communication of the tokens a PE, a DE
            computes, on each direction of a GPU's CNIC.
    """

    miss: Fraction = Fraction(0)
    gen: Fraction = Fraction(0)
    prefill_collectives: Fraction = Fraction(0)
    decode_collectives: Fraction = Fraction(0)


@dataclass(frozen=True, slots=True)
class Load:
    """Average load of one link of one node.

    Attributes:
        node: index among the nodes of its kind.
        gbs, capacity_gbs: GB/s.
    """

    link: Link
    node: int
    gbs: Fraction
    capacity_gbs: Fraction

    @property
    def utilisation(self) -> Fraction:
        """Share of its capacity; above 1 the storage NICs cannot be saturated."""
        return self.gbs / self.capacity_gbs


def loads(
    prefill: Sequence[Node], decode: Sequence[Node], extra: Extra | None = None
) -> tuple[Load, ...]:
    """Loads of all links while every SNIC reads at full rate; nodes may differ.

    Args:
        prefill, decode: the nodes, at least one of each.
        extra: further traffic per hit byte; none when None.

    Raises:
        ValueError: a kind has no nodes, or a node reads more than the requests it is given, so
            that no division of equal shares lets its SNIC work at full rate.
    """
    if not prefill or not decode:
        raise ValueError("at least one prefill and one decode node are needed")
    extra = extra or Extra()
    hits = sum((node.snic_gbs for node in (*prefill, *decode)), Fraction(0))
    found: list[Load] = []
    for kind, nodes, links in (("prefill", prefill, PE_LINKS), ("decode", decode, DE_LINKS)):
        share = hits / len(nodes)
        for index, node in enumerate(nodes):
            own = node.snic_gbs
            if own > share:
                raise ValueError(
                    f"{kind} node {index}: its SNIC reads {float(own):g} GB/s, but an equal share "
                    f"of all requests is {float(share):g} GB/s: it cannot be kept busy"
                )
            flows = (
                {"P1": own, "P2": own, "P4": own, "D2": share - own}
                if kind == "prefill"
                else {"D1": own, "D2": own, "D5": own, "P4": share - own, "P5": share - own}
            ) | _further(kind, share, extra)
            found += [
                Load(link, index, _through(link, flows), node.capacity_gbs(link)) for link in links
            ]
    return tuple(found)


def _further(kind: str, share: Fraction, extra: Extra) -> dict[str, Fraction]:
    miss = share * extra.miss
    if kind == "prefill":
        return {"miss": miss, "pe_collectives": share * extra.prefill_collectives}
    gen = share * extra.gen
    return {
        "miss": miss,
        "miss_decode": miss,
        "gen": gen,
        "write_back": miss + gen,
        "de_collectives": share * extra.decode_collectives,
    }


def _through(link: Link, flows: dict[str, Fraction]) -> Fraction:
    return sum((rate for name, rate in flows.items() if link in FLOWS[name]), Fraction(0))
