"""Control messages, however the bytes come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from dualpath.control.channel import MAX_MESSAGE_BYTES, Channel, ChannelError
from dualpath.control.messages import Close, Closed

pytestmark = pytest.mark.unit

FIRST = Close(rid="a", attempt=0, reason="because")
SECOND = Closed(rid="b", attempt=3)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


BOTH = b"".join(framed(msgspec.msgpack.encode(message)) for message in (FIRST, SECOND))


@asynccontextmanager
async def ends() -> AsyncIterator[tuple[Channel[Close | Closed], asyncio.StreamWriter]]:
    """A channel, and what writes to it."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    _, peer = await asyncio.open_connection(sock=theirs)
    channel: Channel[Close | Closed] = Channel(reader, writer, Close | Closed)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(10):
            yield channel, peer
    finally:
        peer.close()
        await channel.close()


async def test_messages_cut_anywhere_and_together() -> None:
    async with ends() as (channel, peer):
        peer.write(BOTH)
        assert [await channel.receive(), await channel.receive()] == [FIRST, SECOND]
        for cut in range(1, len(BOTH)):
            peer.write(BOTH[:cut])
            found = asyncio.create_task(channel.receive())
            await asyncio.sleep(0)
            peer.write(BOTH[cut:])
            assert [await found, await channel.receive()] == [FIRST, SECOND]


async def test_a_reader_that_gives_up_loses_nothing() -> None:
    async with ends() as (channel, peer):
        peer.write(BOTH[:9])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await channel.receive()
        peer.write(BOTH[9:])
        assert [await channel.receive(), await channel.receive()] == [FIRST, SECOND]


async def test_a_broken_message_takes_none_behind_it() -> None:
    async with ends() as (channel, peer):
        peer.write(framed(b"\xc1 no message") + BOTH)
        with pytest.raises(ChannelError, match="not a control message"):
            await channel.receive()
        assert [await channel.receive(), await channel.receive()] == [FIRST, SECOND]


async def test_a_message_that_is_too_large_is_not_waited_for() -> None:
    async with ends() as (channel, peer):
        peer.write((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ChannelError, match="too large"):
            await channel.receive()


@pytest.mark.parametrize("sent", [b"", BOTH[:2], BOTH[:10]])
async def test_an_end_in_the_middle_is_an_end(sent: bytes) -> None:
    async with ends() as (channel, peer):
        peer.write(sent)
        peer.close()
        with pytest.raises(EOFError, match="closed the control connection"):
            await channel.receive()


async def test_what_came_before_the_end_is_still_there() -> None:
    async with ends() as (channel, peer):
        peer.write(BOTH)
        peer.close()
        assert [await channel.receive(), await channel.receive()] == [FIRST, SECOND]
        with pytest.raises(EOFError):
            await channel.receive()
