"""What ``dualpath profile`` measured on a cluster, and how thresholds follow from it. Pure."""

from __future__ import annotations

import math

import msgspec

from dualpath.scheduler.attention_time import AttentionTimeModel

ALPHA_S = 3.0
"""alpha is what one SNIC reads in this many seconds (arXiv 2602.21548, A.4)."""
BETA_S = 5.0
"""beta is what one engine processes in this many seconds (A.4)."""


class ProfileError(ValueError):
    """A profile cannot be used; the message says why."""


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured figures of one cluster.

    Attributes:
        model: the model's name; hardware: of the machine that was measured; for people.
        token_bytes: KV bytes of a token in all layers.
        snic_read_bytes_s: what each node's SNIC reads from storage, by node.
        miss_tokens_per_s: prompt tokens that one PE computes in a second.
        hit_ratio: hit tokens as a part of all prompt tokens, in the workload measured.
        attention: the fitted attention-time model.

    Raises:
        ProfileError: a figure is out of range.
    """

    model: str
    hardware: str
    token_bytes: int
    snic_read_bytes_s: dict[str, float]
    miss_tokens_per_s: float
    hit_ratio: float
    attention: AttentionTimeModel

    def __post_init__(self) -> None:
        if self.token_bytes <= 0 or not self.snic_read_bytes_s:
            raise ProfileError("token_bytes and snic_read_bytes_s are needed")
        if min(self.snic_read_bytes_s.values()) <= 0 or self.miss_tokens_per_s <= 0:
            raise ProfileError("every rate must be above zero")
        if not 0 <= self.hit_ratio < 1:
            raise ProfileError(f"hit_ratio must be in 0 .. 1, got {self.hit_ratio}")

    @property
    def alpha_tokens(self) -> int:
        """Tokens that the slowest node's SNIC reads in ``ALPHA_S``."""
        slowest = min(self.snic_read_bytes_s.values())
        return max(1, math.floor(slowest * ALPHA_S / self.token_bytes))

    @property
    def beta_tokens(self) -> int:
        """``BETA_S`` of miss tokens, in the unit of tok_e, which counts hit tokens too: divided
        by the share of tokens that are misses."""
        return max(1, math.floor(BETA_S * self.miss_tokens_per_s / (1.0 - self.hit_ratio)))


def decode_profile(raw: bytes) -> Profile:
    """A profile from its JSON.

    Raises:
        ProfileError: not JSON of a profile; one line naming the field.
    """
    try:
        return msgspec.json.decode(raw, type=Profile)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"not a profile: {error}") from None


def encode_profile(profile: Profile) -> bytes:
    """Indented JSON that ``decode_profile`` reads back."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n"
