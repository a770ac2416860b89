"""Measures a running cluster: what ``dualpath profile`` does (docs/scheduler.md)."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Sequence
from statistics import median
from typing import Final

from dualpath.config import Mode, Role
from dualpath.scheduler.attention_time import AttentionTimeModel, FitRefusedError, fit
from dualpath.scheduler.profile import Profile, ProfileError
from dualpath.workload.agents import FIRST_PLAIN_ID, token_agents
from dualpath.workload.attention_grid import grid, measurements, pass_s
from dualpath.workload.client import Endpoint
from dualpath.workload.options import ReplayOptions
from dualpath.workload.profile_options import Measured, ProfileOptions, Report
from dualpath.workload.profile_target import Attention, Past, ProfileFailed, Target, View
from dualpath.workload.replay import replay
from dualpath.workload.snic_bench import SnicBench
from dualpath.workload.stream import RequestFailed
from dualpath.workload.synth import regular

PROMPTS: Final = 4
MOST_PROMPT_TOKENS: Final = 2048
GRID_PASS_S: Final = 40.0
LEAST_PASSES, MOST_PASSES = 3, 8
GOOD_FIT: Final = 0.10
DEFAULT_REPLAY: Final = (4, 6)
"""Agents and turns of the replay that gives a hit ratio where nothing else does."""
logger = logging.getLogger(__name__)
_LOOK_STEP_S: Final = 0.05
_REPORTS_S: Final = 3.0
_READ_POLICY: Final = {Role.PREFILL: "pe_only", Role.DECODE: "de_only"}


async def measure(options: ProfileOptions, report: Report) -> Measured:
    """Measure the cluster behind ``options.url``, which serves nobody else meanwhile.

    Its mode is changed for the time and given back.

    Raises:
        ProfileFailed: it could not be measured, or not in time.
        FitRefusedError: the attention times do not make a usable model.
    """
    try:
        async with (
            asyncio.timeout(options.timeout_s),
            Endpoint(options.url, options.api_key) as api,
            Endpoint(options.url, options.admin_key) as admin,
        ):
            target = Target(api, admin, options.model, options.timeout_s)
            before = await target.view()
            run = _Run(options, target, before, report)
            await target.set_policy(Mode.DUALPATH.value, "pe_only")
            try:
                measured = await run.all()
            except BaseException:  # whatever it was goes on to the caller
                await _give_back(target, before)
                raise
            await target.set_policy(before.mode, before.policy)
            return measured
    except TimeoutError:
        raise ProfileFailed(f"not over after {options.timeout_s:g} s (--timeout)") from None


async def _give_back(target: Target, before: View) -> None:
    """The mode, after a failure: another one must not hide what came first."""
    try:
        await target.set_policy(before.mode, before.policy)
    except ProfileFailed as error:
        logger.warning("the front's mode could not be given back: %s", error)


class _Run:
    def __init__(
        self, options: ProfileOptions, target: Target, before: View, report: Report
    ) -> None:
        for role in Role:
            if not before.usable(role):
                raise ProfileFailed(f"the front has no usable {role.value} engine")
        if before.kv is None:
            raise ProfileFailed("the front does not know its engines' KV yet")
        self._options = options
        self._target = target
        self._before = before
        self._report = report
        self._kv = before.kv
        self._random = random.Random(secrets.randbits(64))
        self._bsz = max(8, min(options.max_batched_tokens, options.max_model_len // 4))
        room = min(MOST_PROMPT_TOKENS, options.max_model_len - self._bsz - 2)
        slots = min(engine.stats.buffer_slots_total for engine in before.engines)
        self._blocks = min(room // self._kv.block_tokens, slots - 1)
        if self._blocks < 1:
            raise ProfileFailed(
                f"no prompt of a whole block of {self._kv.block_tokens} tokens fits: "
                f"max_model_len is {options.max_model_len}, the smallest buffer has {slots} blocks"
            )
        self._prompts = [self._words(self._blocks * self._kv.block_tokens) for _ in range(PROMPTS)]

    def _words(self, count: int) -> list[int]:
        top = max(self._options.vocab, FIRST_PLAIN_ID + 1)
        return [self._random.randrange(FIRST_PLAIN_ID, top) for _ in range(count)]

    async def all(self) -> Measured:
        """Every step, in the order in which each needs the ones before. The front reads on the PE
        side only at the start."""
        miss_tokens_s = await self._miss_rate()
        rates: dict[str, float] = {}
        bounds: list[str] = []
        for role in Role:
            await self._policy(_READ_POLICY[role])
            bench = SnicBench(self._target, role, self._prompts, self._kv.block_tokens)
            for node, rate in (await bench.rates(self._before, self._report)).items():
                rates[node] = rate.bytes_s
                if not rate.exact:
                    bounds.append(node)
        await self._policy("paper")
        attention = await self._attention(miss_tokens_s, sum(rates.values()))
        hit_ratio, source = await self._hit_ratio()
        try:
            profile = Profile(
                model=self._options.model,
                hardware=self._options.hardware,
                token_bytes=self._kv.token_bytes,
                snic_read_bytes_s=rates,
                miss_tokens_per_s=miss_tokens_s,
                hit_ratio=hit_ratio,
                attention=attention,
            )
        except ProfileError as error:
            raise ProfileFailed(f"what was measured makes no profile: {error}") from None
        return Measured(profile, tuple(bounds), source)

    async def _policy(self, policy: str) -> None:
        await self._target.set_policy(Mode.DUALPATH.value, policy)

    # ---- prefill -----------------------------------------------------------------------------

    async def _miss_rate(self) -> float:
        """Tokens a second of one PE that computes prompts without hits; stores the prompts."""
        await self._target.prompt(self._words(16))  # an engine's first step is slow
        known = {past.rid for past in await self._target.past()}
        for number, prompt in enumerate(self._prompts):
            self._report("prefill", number, len(self._prompts))
            await self._target.prompt(prompt)
        rates = [
            past.prompt_tokens / past.phases["prefill"]
            for past in await self._new_records(known, len(self._prompts))
            if not past.hit_tokens and past.phases.get("prefill")
        ]
        if not rates:
            raise ProfileFailed("the front says nothing about the prefills")
        return median(rates)

    async def _new_records(self, known: set[str], count: int) -> list[Past]:
        """Records appear a moment after their answers."""
        end_s = _now_s() + _REPORTS_S
        while True:
            new = [past for past in await self._target.past() if past.rid not in known]
            if len(new) >= count or _now_s() > end_s:
                return new
            await asyncio.sleep(_LOOK_STEP_S)

    # ---- attention ---------------------------------------------------------------------------

    async def _attention(self, miss_tokens_s: float, read_bytes_s: float) -> AttentionTimeModel:
        """Time steps of a single request over the grid, until the model is good."""
        blocks, bsz, block_tokens = self._blocks, self._bsz, self._kv.block_tokens
        cells = grid(blocks, block_tokens, bsz)
        while (
            pass_s(cells, self._kv.token_bytes, read_bytes_s, miss_tokens_s) > GRID_PASS_S
            and blocks > 4
        ):
            blocks, bsz = max(4, blocks // 2), max(64, bsz // 2)
            cells = grid(blocks, block_tokens, bsz)
        before = await self._target.attention()
        refused: FitRefusedError | None = None
        model: AttentionTimeModel | None = None
        for number in range(MOST_PASSES):
            for done, (cached, count) in enumerate(cells):
                self._report(f"attention, pass {number + 1}", done, len(cells))
                prompt = self._random.choice(self._prompts)[:cached] + self._words(count)
                await self._target.prompt(prompt)
            await asyncio.sleep(0.5)  # the last samples are on their way
            samples = _since(await self._target.attention(), before)
            if not samples:
                raise ProfileFailed("the prefill engines report no attention times")
            if number + 1 < LEAST_PASSES:
                continue
            try:
                model = fit(
                    measurements(samples),
                    model=self._options.model,
                    hardware=self._options.hardware,
                )
            except FitRefusedError as error:
                refused = error
            else:
                if model.mean_relative_error <= GOOD_FIT:
                    break
        if model is None:
            assert refused is not None
            raise refused
        return model

    # ---- workload ----------------------------------------------------------------------------

    async def _hit_ratio(self) -> tuple[float, str]:
        """Hit tokens as a part of all prompt tokens, and of what."""
        options, served = self._options, self._before.tokens
        if options.hit_ratio is not None:
            return options.hit_ratio, options.hit_ratio_of
        if served.hit + served.miss:
            return served.hit / (served.hit + served.miss), "what the front had served"
        agents, turns = DEFAULT_REPLAY
        append = max(1, min(128, options.max_model_len // (turns + 1) - 16))
        made = token_agents(
            list(regular(agents, turns, append, 16)), agents, secrets.randbits(31),
            options.vocab, False,
        )  # fmt: skip
        try:
            result = await replay(
                made,
                ReplayOptions(
                    url=options.url, model=options.model, api_key=options.api_key,
                    latency_scale=0.0, keep_records=False,
                ),
                progress=lambda now: self._report(
                    "hit ratio", now.requests_done, now.requests_total
                ),
            )  # fmt: skip
        except RequestFailed as error:
            raise ProfileFailed(f"the replay for the hit ratio failed: {error}") from None
        figures = result.figures
        if not result.ok or figures.cached_tokens is None:
            raise ProfileFailed(
                f"the replay for the hit ratio failed: {figures.first_error or 'no usage figures'}"
            )
        source = f"a replay of {agents} agents, {turns} turns of {append} + 16 tokens"
        return figures.cached_tokens / figures.tokens_in, source


def _since(
    now: dict[str, Attention], before: dict[str, Attention]
) -> Sequence[tuple[int, int, float]]:
    """Samples that came after ``before``."""
    new: list[tuple[int, int, float]] = []
    for name, attention in now.items():
        earlier = before.get(name)
        count = attention.total - (earlier.total if earlier is not None else 0)
        # A PE that joined again counts from zero.
        new += attention.samples[-count:] if count > 0 else []
    return new


def _now_s() -> float:
    return asyncio.get_running_loop().time()
