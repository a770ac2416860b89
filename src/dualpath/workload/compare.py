"""Whether two runs of the same requests gave the same answers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dualpath.workload.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place, in order of agent and round, where two runs part.

    Attributes:
        agent, round: which request.
        what: one line saying how they differ.
        token: index of the first different token; None when it is not about tokens.
    """

    agent: int
    round: int
    what: str
    token: int | None = None

    def __str__(self) -> str:
        return f"agent {self.agent} round {self.round}: {self.what}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome.

    Attributes:
        requests: requests that both runs answered and whose answers were compared.
        different: requests that differ, or that one run lacks or failed.
        tokens: tokens that were compared id by id.
        by_text: requests compared by text, because a run has no token ids for them.
        first: the first difference; None when equal.
    """

    requests: int
    different: int
    tokens: int
    by_text: int
    first: Difference | None

    @property
    def equal(self) -> bool:
        """Every request of either run is answered in both, with the same answer. Two empty runs
        are not equal: nothing was shown."""
        return self.first is None and self.requests > 0


def compare(left: Iterable[RequestRecord], right: Iterable[RequestRecord]) -> Comparison:
    """Compare two runs, request by request; the order of records does not matter.

    Raises:
        ValueError: a run holds two records of one request.
    """
    ours, theirs = _by_place(left), _by_place(right)
    compared = different = tokens = by_text = 0
    first: Difference | None = None
    for place in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(place), theirs.get(place)
        found = _difference(place, one, other)
        if one is not None and other is not None and one.ok and other.ok:
            compared += 1
            if one.token_ids is None or other.token_ids is None:
                by_text += 1
            else:
                tokens += min(len(one.token_ids), len(other.token_ids))
        if found is not None:
            different += 1
            first = first or found
    return Comparison(compared, different, tokens, by_text, first)


def _by_place(records: Iterable[RequestRecord]) -> dict[tuple[int, int], RequestRecord]:
    placed: dict[tuple[int, int], RequestRecord] = {}
    for record in records:
        place = (record.agent, record.round)
        if place in placed:
            raise ValueError(f"agent {record.agent} round {record.round} is recorded twice")
        placed[place] = record
    return placed


def _difference(
    place: tuple[int, int], one: RequestRecord | None, other: RequestRecord | None
) -> Difference | None:
    if one is None or other is None:
        return Difference(*place, f"only the {'second' if one is None else 'first'} run has it")
    for record, which in ((one, "first"), (other, "second")):
        if not record.ok:
            return Difference(*place, f"failed in the {which} run: {record.error}")
    if one.prompt_digest != other.prompt_digest:
        return Difference(*place, "the prompts differ, before any answer of this round")
    if one.token_ids is None or other.token_ids is None:
        if one.text == other.text:
            return None
        return Difference(*place, f"texts differ: {one.text!r} / {other.text!r}")
    for index, (ours, theirs) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        if ours != theirs:
            return Difference(*place, f"token {index}: {ours} / {theirs}", index)
    if len(one.token_ids) != len(other.token_ids):
        index = min(len(one.token_ids), len(other.token_ids))
        what = f"lengths differ: {len(one.token_ids)} / {len(other.token_ids)} tokens"
        return Difference(*place, what, index)
    return None
