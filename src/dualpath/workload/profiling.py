"""Measures a running cluster: what ``dualpath profile`` does (docs/scheduler.md)."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from dualpath.config import Mode, Role
from dualpath.scheduler.attention_time import AttentionTimeModel, FitRefusedError, fit
from dualpath.scheduler.profile import Profile, ProfileError
from dualpath.workload.agents import FIRST_PLAIN_ID, token_agents
from dualpath.workload.attention_grid import grid, measurements, pass_s
from dualpath.workload.client import Endpoint
from dualpath.workload.options import ReplayOptions
from dualpath.workload.profile_target import Attention, Past, ProfileFailed, Target, View
from dualpath.workload.replay import replay
from dualpath.workload.snic_rate import Busy, Look, over_all, while_busy
from dualpath.workload.stream import RequestFailed
from dualpath.workload.synth import regular

BUSY_S: Final = 2.0
"""A SNIC must have been seen busy for this long; else its rate is a lower bound."""
PROMPTS: Final = 4
MOST_PROMPT_TOKENS: Final = 2048
GRID_PASS_S: Final = 40.0
LEAST_PASSES, MOST_PASSES = 3, 8
GOOD_FIT: Final = 0.10
DEFAULT_REPLAY: Final = (4, 6)
"""Agents and turns of the replay that gives a hit ratio where nothing else does."""
_LOOK_STEP_S: Final = 0.05
_REPORTS_S: Final = 3.0
_READ_POLICY: Final = {Role.PREFILL: "pe_only", Role.DECODE: "de_only"}

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
            try:
                return await _Run(options, target, before, report).all()
            finally:
                await target.set_policy(before.mode, before.policy)
    except TimeoutError:
        raise ProfileFailed(f"not over after {options.timeout_s:g} s") from None


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
        """Every step, in the order in which each needs the ones before."""
        await self._policy("pe_only")
        miss_tokens_s = await self._miss_rate()
        rates: dict[str, float] = {}
        bounds: list[str] = []
        for role in Role:
            await self._policy(_READ_POLICY[role])
            for node, (busy, enough) in (await self._snic(role)).items():
                rates[node] = busy.bytes_s
                if not enough:
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

    # ---- storage -----------------------------------------------------------------------------

    async def _snic(self, role: Role) -> dict[str, tuple[Busy, bool]]:
        """Read rate of every node of ``role``, and whether it was busy for long enough."""
        engines = len(self._before.usable(role))
        sizes = [
            (min(blocks, self._blocks), each * engines)
            for blocks, each in ((4, 2), (16, 2), (self._blocks, 2), (self._blocks, 8),
                                 (self._blocks, 24))
        ]  # fmt: skip
        found: dict[str, tuple[Busy, bool]] = {}
        for step, (blocks, count) in enumerate(sizes):
            self._report(f"SNIC reads, {role.value}", step, len(sizes))
            start_s = _now_s()
            looks = await self._burst(role, blocks, count)
            for node, seen in looks.items():
                busy, bound = while_busy(seen), over_all(seen, start_s)
                if busy.seconds >= BUSY_S:
                    found[node] = (busy, True)
                elif not found.get(node, (bound, False))[1]:
                    known = found.get(node, (bound, False))[0]
                    found[node] = (max(known, bound, key=lambda b: b.bytes_s), False)
            if all(enough for _, enough in found.values()):
                break
        for node, (busy, _) in found.items():
            if not busy.read_bytes:
                raise ProfileFailed(f"node {node} read nothing: its engines got no hits")
        return found

    async def _burst(self, role: Role, blocks: int, count: int) -> dict[str, list[Look]]:
        """``count`` prompts at once that hit ``blocks``; looks at the nodes of ``role``."""
        tokens = blocks * self._kv.block_tokens
        asked = asyncio.gather(
            *(
                self._target.prompt(self._prompts[number % PROMPTS][:tokens] + self._words(1))
                for number in range(count)
            )
        )
        looks: dict[str, list[Look]] = {}
        try:
            over = False
            while not over:
                over = asked.done()  # one more look after the end
                view = await self._target.view()
                for node, look in _looks(view, role).items():
                    looks.setdefault(node, []).append(look)
                await asyncio.sleep(_LOOK_STEP_S)
            for answer in await asked:
                if answer.cached_tokens != tokens:
                    raise ProfileFailed(
                        f"a stored prompt of {tokens} tokens hit only {answer.cached_tokens}: is "
                        "the store full or failing?"
                    )
        finally:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        return looks

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


def _looks(view: View, role: Role) -> dict[str, Look]:
    """Every node of ``role`` now."""
    queued: dict[str, bool] = {}
    for engine in view.usable(role):
        queued[engine.node] = queued.get(engine.node, True) and (engine.stats.read_queue_tokens > 0)
    now_s = _now_s()
    return {node: Look(now_s, view.snic.get(node, 0), busy) for node, busy in queued.items()}


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
