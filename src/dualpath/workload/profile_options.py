"""What measuring a cluster is told, what it reports on the way, and what comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dualpath.scheduler.profile import Profile

Report = Callable[[str, int, int], None]
"""Told what is measured now, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """How to measure.

    Attributes:
        url: of the front.
        api_key, admin_key: bearer tokens; empty for none.
        model: name in the API.
        max_model_len, max_batched_tokens: the engines' limits, in tokens.
        vocab: token ids are drawn below this.
        hardware: what is measured, for people.
        hit_ratio: given, or None to take it from the front or a replay; hit_ratio_of: of what.
        timeout_s: deadline of everything.
    """

    url: str
    model: str
    max_model_len: int
    max_batched_tokens: int
    vocab: int
    hardware: str
    api_key: str = ""
    admin_key: str = ""
    hit_ratio: float | None = None
    hit_ratio_of: str = ""
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A profile and how it came about.

    Attributes:
        lower_bounds: nodes whose SNIC was never seen busy for long: faster than it was asked.
        hit_ratio_of: what the hit ratio was taken from.
    """

    profile: Profile
    lower_bounds: tuple[str, ...]
    hit_ratio_of: str
