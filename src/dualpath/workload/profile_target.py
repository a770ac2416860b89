"""A DualPath front as ``dualpath profile`` uses it: prompts in, figures out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from dualpath import measuring
from dualpath.config import Role
from dualpath.workload.client import Endpoint
from dualpath.workload.front import STATE_PATH
from dualpath.workload.stream import Answer, RequestFailed

_LOOK_S: Final = 10.0
_BUSY_S: Final = 10.0
_BUSY_STEP_S: Final = 0.2
_REFUSED_BUSY: Final = 409

T = TypeVar("T")


class ProfileFailed(RuntimeError):
    """The cluster could not be measured; one line that says why."""


class Stats(msgspec.Struct, frozen=True):
    """Of an engine's latest report."""

    read_queue_tokens: int
    buffer_slots_total: int


class EngineView(msgspec.Struct, frozen=True):
    """An engine in ``/debug/state``."""

    name: str
    role: Role
    node: str
    usable: bool
    stats: Stats


class Tokens(msgspec.Struct, frozen=True):
    """Prompt tokens served since the front started, without those of measurements."""

    hit: int
    miss: int


class Kv(msgspec.Struct, frozen=True):
    """What the engines agree on."""

    token_bytes: int
    block_tokens: int


class View(msgspec.Struct, frozen=True):
    """``/debug/state``, as far as it is needed here."""

    mode: str
    policy: str
    snic: dict[str, int]
    tokens: Tokens
    kv: Kv | None
    engines: tuple[EngineView, ...]

    def usable(self, role: Role) -> list[EngineView]:
        """Engines of ``role`` that get work."""
        return [engine for engine in self.engines if engine.role is role and engine.usable]


class Past(msgspec.Struct, frozen=True):
    """A finished request in ``/debug/requests``."""

    rid: str
    prompt_tokens: int
    hit_tokens: int
    phases: dict[str, float]


class _Requests(msgspec.Struct, frozen=True):
    requests: list[Past]


class Attention(msgspec.Struct, frozen=True):
    """A PE in ``/debug/attention``: ``(cached, bsz, seconds)``, newest last, of ``total``."""

    total: int
    samples: list[tuple[int, int, float]]


class _Engines(msgspec.Struct, frozen=True):
    engines: dict[str, Attention]


class Target:
    """One front. One owner; prompts may be sent at the same time.

    Args:
        api: as a client of the front; admin: as its administrator.
        model: name to ask for.
        timeout_s: deadline of a prompt.
    """

    def __init__(self, api: Endpoint, admin: Endpoint, model: str, timeout_s: float) -> None:
        self._api = api
        self._admin = admin
        self._model = model
        self._timeout_s = timeout_s
        # Nobody else's blocks may be hit, and ours by nobody else.
        self._salt = f"{measuring.SALT}{secrets.token_hex(8)}"

    async def view(self) -> View:
        """The front's state now.

        Raises:
            ProfileFailed: it does not let us see.
        """
        return await self._get(STATE_PATH, View)

    async def past(self) -> list[Past]:
        """The last requests, newest last.

        Raises:
            ProfileFailed: the front does not let us see.
        """
        return (await self._get("/debug/requests", _Requests)).requests

    async def attention(self) -> dict[str, Attention]:
        """The latest attention samples, by PE.

        Raises:
            ProfileFailed: the front does not let us see.
        """
        return (await self._get("/debug/attention", _Engines)).engines

    async def set_policy(self, mode: str, policy: str) -> None:
        """Serve with these policies from now on; waits for requests under way to end.

        Raises:
            ProfileFailed: they do not end, or the front refuses.
        """
        body = {"mode": mode, "policy": policy}
        end_s = asyncio.get_running_loop().time() + _BUSY_S
        while True:
            try:
                status, answer = await self._admin.post("/admin/mode", body, _LOOK_S)
            except RequestFailed as error:
                raise ProfileFailed(str(error)) from None
            if status == 200:
                return
            if status != _REFUSED_BUSY or asyncio.get_running_loop().time() > end_s:
                text = answer.decode(errors="replace").strip()[:200]
                reason = "others use the front" if status == _REFUSED_BUSY else f"HTTP {status}"
                raise ProfileFailed(f"the mode cannot be changed: {reason}: {text}")
            await asyncio.sleep(_BUSY_STEP_S)

    async def prompt(self, tokens: Sequence[int]) -> Answer:
        """Have one token generated.

        Raises:
            ProfileFailed: there is no answer.
        """
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
            "return_token_ids": True, "cache_salt": self._salt,
        }  # fmt: skip
        try:
            return await self._api.ask(
                "/v1/completions", body, timeout_s=self._timeout_s, retries=0
            )
        except RequestFailed as error:
            raise ProfileFailed(f"a prompt of {len(tokens)} tokens failed: {error}") from None

    async def _get(self, path: str, kind: type[T]) -> T:
        try:
            status, body = await self._admin.get(path, _LOOK_S)
        except RequestFailed as error:
            raise ProfileFailed(str(error)) from None
        if status != 200:
            raise ProfileFailed(f"{self._admin.url}{path} answers HTTP {status}")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ProfileFailed(
                f"{self._admin.url}{path}: not a front of this version: {error}"
            ) from None
