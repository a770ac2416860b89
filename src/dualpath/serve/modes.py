"""What a mode means for a request, beside the scheduler's policy (``SchedulerSettings.of``)."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.config import ClusterConfig, ConfigError, Mode


@dataclass(frozen=True, slots=True)
class ModePlan:
    """A mode in terms of what engines do.

    Attributes:
        mode: whose plan this is.
        layerwise: overlap loads and pushes with compute.
        bypass: move no bytes.
        persist: write new blocks.
        quota: cut prefill batches by attention time.
    """

    mode: Mode
    layerwise: bool = True
    bypass: bool = False
    persist: bool = True
    quota: bool = True


def plan_for(mode: Mode, config: ClusterConfig) -> ModePlan:
    """The plan of ``mode``.

    Raises:
        ConfigError: oracle mode without ``benchmark = true``.
    """
    match mode:
        case Mode.BASIC:
            return ModePlan(mode, layerwise=False, quota=False)
        case Mode.ORACLE:
            if not config.benchmark:
                raise ConfigError(
                    "mode: 'oracle' gives meaningless answers; set benchmark = true for it"
                )
            return ModePlan(mode, bypass=True, persist=False)
        case _:
            return ModePlan(mode)
