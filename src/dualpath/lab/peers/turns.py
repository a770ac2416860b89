"""One turn over two engines: the prompt at a prefill engine, then everything at a decode engine.

Token 1 goes to the client as soon as the prefill engine has it, as ours does; the decode engine
computes it once more, and that one is not sent. So TTFT means the same for all that is compared,
and is a decode engine's step shorter than with the routers that peers are usually run behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import aiohttp
import msgspec

from dualpath.lab.peers.kept import Keeping
from dualpath.workload.sse import EventParser

T = TypeVar("T")

_ERROR_BYTES: Final = 2000
_DONE: Final = b"[DONE]"
_FRESH: Final = {"do_remote_decode": True, "do_remote_prefill": False}


class TurnFailed(RuntimeError):
    """An engine answered something of no use; ``status`` is what to tell the client."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Choice(msgspec.Struct):
    """Tokens of an answer."""

    token_ids: list[int]
    text: str = ""
    index: int = 0
    finish_reason: str | None = None


class Whole(msgspec.Struct):
    """An answer that is not streamed."""

    choices: list[Choice]
    usage: dict[str, Any]
    kv_transfer_params: dict[str, Any] | None = None


class Chunk(msgspec.Struct):
    """An event of a streamed answer."""

    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_WHOLE: Final = msgspec.json.Decoder(Whole)
_CHUNK: Final = msgspec.json.Decoder(Chunk)


class Turn:
    """A request under way. One owner."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        body: Mapping[str, Any],
        salt: str,
        keeping: Keeping | None,
    ) -> None:
        """
        Args:
            body: the client's request to ``/v1/completions``.
            salt: requests of different salts share no stored KV.
            keeping: what decode engines keep; None where they keep nothing.
        """
        own = {"stream_options", "stream", "max_tokens"}
        self._session = session
        self._prompt: Sequence[int] = body["prompt"]
        self._gen_tokens = int(body["max_tokens"])
        self._options = body.get("stream_options")
        self._body = {key: value for key, value in body.items() if key not in own}
        self._body |= {"return_token_ids": True, "cache_salt": salt}
        self._keeping = keeping
        self._first = Choice([])
        self._params: Mapping[str, Any] | None = None

    async def prefill(self, url: str, now_s: float) -> None:
        """Compute the prompt's KV and token 1.

        Raises:
            TurnFailed: the engine did not.
        """
        kept = self._keeping.take(self._prompt, now_s) if self._keeping else None
        answer = await self._whole(url, 1, {**(kept or {}), **_FRESH})
        self._first, self._params = answer.choices[0], answer.kv_transfer_params
        if len(self._first.token_ids) != 1 or self._params is None:
            raise TurnFailed(502, f"{url}: gave no token, or no way to its KV")

    async def answer(self, url: str, clock: Callable[[], float]) -> AsyncIterator[bytes]:
        """The events for the client. Errors are events too: the status is sent.

        Args:
            clock: tells the time in seconds.
        """
        over = self._first.finish_reason if self._gen_tokens == 1 else None
        yield _event({"choices": [{**msgspec.to_builtins(self._first), "finish_reason": over}]})
        try:
            if self._keeping is None:
                async for chunk in self._streamed(url):
                    yield _event(chunk)
            else:
                yield _event(await self._kept(url, self._keeping, clock))
        except TurnFailed as error:
            yield _event({"error": {"message": str(error)}})
            return
        yield b"data: " + _DONE + b"\n\n"

    async def _kept(self, url: str, keeping: Keeping, clock: Callable[[], float]) -> dict[str, Any]:
        """The whole answer at once: vLLM says where its KV is kept only in one that is not
        streamed."""
        answer = await self._whole(url, self._gen_tokens, self._params)
        choice, params = answer.choices[0], answer.kv_transfer_params
        if params:
            tokens = [*self._prompt, *choice.token_ids][: params["remote_num_tokens"]]
            keeping.add(tokens, params, clock())
        return {"choices": self._rest(choice), "usage": answer.usage}

    async def _streamed(self, url: str) -> AsyncIterator[dict[str, Any]]:
        body = self._body | {
            "stream": True, "stream_options": self._options,
            "max_tokens": self._gen_tokens, "kv_transfer_params": self._params,
        }  # fmt: skip
        parser, begun = EventParser(), False
        async with self._post(url, body) as response:
            async for piece in response.content.iter_any():
                for payload in parser.feed(piece):
                    if payload == _DONE:
                        return
                    chunk = _decoded(_CHUNK, payload, url)
                    if chunk.error is not None:
                        raise TurnFailed(502, f"{url}: {chunk.error}")
                    choices = msgspec.to_builtins(chunk.choices)
                    if not begun and chunk.choices:
                        choices, begun = self._rest(chunk.choices[0]), True
                    yield {"choices": choices, "usage": chunk.usage}
        raise TurnFailed(502, f"{url}: the answer ended early")

    def _rest(self, choice: Choice) -> list[dict[str, Any]]:
        """What follows token 1."""
        first = self._first
        if choice.token_ids[:1] != first.token_ids:
            raise TurnFailed(
                502,
                f"token 1 is {first.token_ids} of the prefill engine and "
                f"{choice.token_ids[:1]} of the decode engine",
            )
        return [
            {
                **msgspec.to_builtins(choice),
                "token_ids": choice.token_ids[1:],
                "text": choice.text.removeprefix(first.text),
            }
        ]

    async def _whole(self, url: str, max_tokens: int, params: Mapping[str, Any] | None) -> Whole:
        body = self._body | {"max_tokens": max_tokens, "kv_transfer_params": params}
        async with self._post(url, body) as response:
            return _decoded(_WHOLE, await response.read(), url)

    @asynccontextmanager
    async def _post(
        self, url: str, body: Mapping[str, Any]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that begins well; every failure is ``TurnFailed``."""
        try:
            async with self._session.post(
                f"{url}/v1/completions", data=msgspec.json.encode(body)
            ) as response:
                if response.status != 200:
                    text = (await response.content.read(_ERROR_BYTES)).decode(errors="replace")
                    raise TurnFailed(response.status, f"{url}: {text}")
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TurnFailed(502, f"{url}: {str(error) or type(error).__name__}") from None


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes, url: str) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TurnFailed(502, f"{url}: an answer that is none: {error}") from None


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
