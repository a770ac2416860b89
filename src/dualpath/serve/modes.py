"""What a mode means for a request."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.config import ClusterConfig, ConfigError, Mode


@dataclass(frozen=True, slots=True)
class ModePlan:
    """A mode in terms of what the parts do.

    Attributes:
        mode: whose plan this is.
        policy: the scheduler's policy set.
        layerwise: overlap loads and pushes with compute.
        bypass: move no bytes.
        persist: write new blocks.
    """

    mode: Mode
    policy: str
    layerwise: bool = True
    bypass: bool = False
    persist: bool = True


_PLANS = {
    Mode.BASIC: ModePlan(Mode.BASIC, "basic", layerwise=False),
    Mode.PE_ONLY: ModePlan(Mode.PE_ONLY, "pe_only"),
    Mode.DUALPATH: ModePlan(Mode.DUALPATH, "paper"),
    Mode.SPLIT: ModePlan(Mode.SPLIT, "split"),
    Mode.ORACLE: ModePlan(Mode.ORACLE, "paper", bypass=True, persist=False),
}


def plan_for(mode: Mode, config: ClusterConfig) -> ModePlan:
    """The plan of ``mode``; ``scheduler.policy`` replaces the mode's own policy set.

    Raises:
        ConfigError: oracle mode without ``benchmark = true``.
    """
    if mode is Mode.ORACLE and not config.benchmark:
        raise ConfigError("mode: 'oracle' gives meaningless answers; set benchmark = true for it")
    plan = _PLANS[mode]
    if config.scheduler.policy:
        return ModePlan(mode, config.scheduler.policy, plan.layerwise, plan.bypass, plan.persist)
    return plan
