"""A PE's compute quota in vLLM: the step's token budget is what attention has time for.

vLLM packs prompts in FIFO order up to a number of tokens and cuts the one that crosses it. So
choosing that number per step gives exactly the batch of ``scheduler.batch``: whole requests while
they fit the quota, then one chunk. Where a long prompt would fill the step and short ones wait,
vLLM's limit on long prompts makes it leave them a part.
"""

from __future__ import annotations

import logging
from itertools import chain
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from dualpath import config as cluster
from dualpath.config import ConfigError, Role
from dualpath.engine.one_step import OneStep
from dualpath.engine.place import place_of
from dualpath.engine.scheduler_side import request_params
from dualpath.scheduler.batch import cut_batch, share_of_long
from dualpath.scheduler.profile import Profile, ProfileError, decode_profile

logger = logging.getLogger(__name__)


class _Quota:
    """Sets the token budget of each step, and what one prompt may take of it. Mixed into vLLM's
    schedulers."""

    # What the mixin uses of vLLM's scheduler.
    running: list[Request]
    waiting: Any
    connector: Any
    kv_cache_config: Any
    scheduler_config: Any
    _layers_take_turns: bool
    max_num_scheduled_tokens: int
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._most_tokens = self.max_num_scheduled_tokens
        place = place_of(self.vllm_config)  # type: ignore[attr-defined]
        described = cluster.load(place.config_file)
        self._is_prefill = place.role is Role.PREFILL
        self._most_of_one = self.scheduler_config.long_prefill_token_threshold
        self._quota_s = float(described.scheduler.compute_quota)
        self._profile = _profile(described.scheduler.profile, place.role)
        layers = len(self.kv_cache_config.kv_cache_groups[0].layer_names)
        self._layers_take_turns = described.layer_regions(place.role, layers) < layers

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """vLLM's, within the quota."""
        # Before super(), never after: vLLM reads both once at the start of a step.
        budget, most_of_one = self._limits()
        self.max_num_scheduled_tokens = budget
        self.scheduler_config.long_prefill_token_threshold = most_of_one
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _limits(self) -> tuple[int, int]:
        """Most tokens of the step, and of one prompt in it (0: any number)."""
        requests = chain(self.running, self.waiting)
        if not self._is_prefill or not all(map(self._in_quota, requests)):
            return self._most_tokens, self._most_of_one
        pending = self._pending()
        budget = self._budget(pending)
        share = share_of_long([left for _, left in pending], budget)
        # A limit of vLLM's own that is set and lower stays in force.
        return budget, min((most for most in (share, self._most_of_one) if most), default=0)

    def _pending(self) -> list[tuple[int, int]]:
        """``(cached, left)`` tokens of the requests that may be in the step, in their order."""
        pending = [
            (request.num_computed_tokens, request.num_tokens - request.num_computed_tokens)
            for request in self.running
        ]
        room = self.max_num_running_reqs - len(pending)
        for request in chain(self.waiting):
            if room <= 0:
                break
            room -= 1
            cached, _ = self.connector.get_num_new_matched_tokens(request, 0)
            pending.append((cached, request.num_tokens - cached))
        return [(cached, max(1, left)) for cached, left in pending]

    def _budget(self, pending: list[tuple[int, int]]) -> int:
        if self._profile is None or not pending:
            return self._most_tokens
        counts = cut_batch(pending, self._quota_s, self._profile.attention, self._most_tokens)
        return max(1, sum(counts))

    def _in_quota(self, request: Request) -> bool:
        """Requests of basic mode, and requests that are not ours, are not held to the quota."""
        params = request_params(request)
        return params is not None and params.quota


class QuotaScheduler(_Quota, OneStep, Scheduler):  # type: ignore[misc]
    """``--scheduler-cls`` of an engine without async scheduling (CPU)."""


class QuotaAsyncScheduler(_Quota, OneStep, AsyncScheduler):  # type: ignore[misc]
    """``--scheduler-cls`` of an engine with async scheduling (the default on CUDA)."""


def _profile(path: str, role: Role) -> Profile | None:
    if role is not Role.PREFILL:
        return None
    if not path:
        logger.warning("no scheduler.profile: batches are cut by tokens, not by attention time")
        return None
    try:
        return decode_profile(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"scheduler.profile: {path}: {error.strerror}") from None
    except ProfileError as error:
        raise ConfigError(f"scheduler.profile: {path}: {error}") from None
