"""Thresholds and policy names of a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from dualpath.config import Mode, SchedulerConfig
from dualpath.scheduler.profile import Profile


class PolicySet(msgspec.Struct, frozen=True):
    """Names of the three policies that make a scheduler (see ``registry``)."""

    prefill: str
    decode: str
    read_path: str


POLICY_SETS: Final[Mapping[str, PolicySet]] = MappingProxyType(
    {
        "paper": PolicySet("least_tokens", "balanced", "shorter_queue"),
        "split": PolicySet("least_tokens", "balanced", "split"),
        # Ours: docs/policies.md.
        "work": PolicySet("least_work", "balanced", "split"),
        "pe_only": PolicySet("least_tokens", "balanced", "pe_only"),
        "de_only": PolicySet("least_tokens", "balanced", "de_only"),
        "alternating": PolicySet("least_tokens", "balanced", "alternating"),
        # The ablation's steps before "scheduling": engines in turn, first without, then with, the
        # DE read path.
        "basic": PolicySet("round_robin", "round_robin", "pe_only"),
        "round_robin": PolicySet("round_robin", "round_robin", "alternating"),
    }
)
_OF_MODE: Final[Mapping[Mode, str]] = MappingProxyType(
    {
        Mode.BASIC: "basic",
        Mode.PE_ONLY: "pe_only",
        Mode.DUALPATH: "paper",
        Mode.SPLIT: "split",
        Mode.ORACLE: "paper",
    }
)


class SchedulerSettings(msgspec.Struct, frozen=True):
    """How to decide.

    Attributes:
        alpha_tokens: a read queue above this is long.
        beta_tokens: an engine with more assigned tokens than this is overloaded.
        z_factor: slack on the average load of a DE group.
        policy: a name of ``POLICY_SETS``, or ``"prefill/decode/read_path"``.

    Raises:
        ValueError: a threshold is out of range or the policy's name is not of either form.
    """

    alpha_tokens: int
    beta_tokens: int
    z_factor: float = 1.05
    policy: str = "paper"

    def __post_init__(self) -> None:
        if self.alpha_tokens < 0 or self.beta_tokens < 0:
            raise ValueError(
                f"alpha_tokens {self.alpha_tokens} and beta_tokens {self.beta_tokens} "
                "must not be negative"
            )
        if not self.z_factor >= 1.0:
            raise ValueError(f"z_factor must be at least 1, got {self.z_factor}")
        _ = self.policies

    @property
    def policies(self) -> PolicySet:
        """The names that ``policy`` stands for."""
        if (named := POLICY_SETS.get(self.policy)) is not None:
            return named
        parts = self.policy.split("/")
        if len(parts) == 3 and all(parts):
            return PolicySet(*parts)
        raise ValueError(
            f"policy must be one of {', '.join(POLICY_SETS)} or 'prefill/decode/read_path', "
            f"got {self.policy!r}"
        )

    @classmethod
    def of(
        cls, config: SchedulerConfig, mode: Mode, profile: Profile | None = None
    ) -> SchedulerSettings:
        """Settings of a cluster; without a policy the mode's own is taken, and a profile's
        thresholds go before those of the file.

        Raises:
            ValueError: the policy's name is unknown.
        """
        measured = config if profile is None else profile
        return cls(
            alpha_tokens=measured.alpha_tokens,
            beta_tokens=measured.beta_tokens,
            z_factor=config.z_factor,
            policy=config.policy or _OF_MODE[mode],
        )
