"""Scheduler settings from the cluster description and, where there is one, its profile."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from dualpath.config import ClusterConfig, ConfigError, Mode, SchedulerConfig
from dualpath.control.messages import Hello
from dualpath.scheduler import SchedulerSettings
from dualpath.scheduler.profile import Profile, ProfileError, decode_profile

logger = logging.getLogger(__name__)


def read_profile(config: SchedulerConfig) -> Profile | None:
    """The measured figures of ``scheduler.profile``; None when it names no file.

    Raises:
        ConfigError: it cannot be read, or is no profile.
    """
    if not config.profile:
        return None
    try:
        return decode_profile(Path(config.profile).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"scheduler.profile: {config.profile} cannot be read: {error.strerror}"
        ) from None
    except ProfileError as error:
        raise ConfigError(f"scheduler.profile: {config.profile}: {error}") from None


class Thresholds:
    """What the scheduler is told about the hardware. Measured figures go before written ones."""

    def __init__(self, config: ClusterConfig) -> None:
        """Raises ConfigError when the profile cannot be used."""
        self._config = config
        self._profile = read_profile(config.scheduler)
        self._warned = False

    def settings(self, mode: Mode, policy: str) -> SchedulerSettings:
        """Settings of ``mode``, with its own policies or those called ``policy``.

        Raises:
            ValueError: no policy is called so.
        """
        described = msgspec.structs.replace(self._config.scheduler, policy=policy)
        return SchedulerSettings.of(described, mode, self._profile)

    def read_tokens_per_s(self, hello: Hello) -> float:
        """What the SNIC of the engine's node reads; 0 when nobody has measured or limited it."""
        token_bytes = hello.fingerprint.num_layers * hello.fingerprint.token_layer_bytes
        if self._profile is not None:
            if self._profile.token_bytes != token_bytes and not self._warned:
                self._warned = True
                logger.warning(
                    "scheduler.profile: %s was measured with another model (%s): measure again",
                    self._config.scheduler.profile,
                    self._profile.model,
                )
            measured = self._profile.snic_read_bytes_s.get(hello.node)
            if measured is not None:
                return measured / token_bytes
        rate = self._config.node(hello.node).snic.read
        return rate / token_bytes if rate.limited else 0.0
