"""Totals over all engines there have been: they never fall, and take no more room with restarts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from front_kit import make_config

from dualpath.config import Role
from dualpath.control.channel import Channel
from dualpath.control.messages import (
    BufferInfo,
    EngineStats,
    Fingerprint,
    Hello,
    Message,
    PeerInfo,
    ToFront,
)
from dualpath.serve.front import Front
from dualpath.serve.members import Member

pytestmark = pytest.mark.integration


class Silent(Channel[ToFront]):
    """A connection over which nothing goes."""

    def __init__(self) -> None:
        pass

    def send(self, message: Message) -> None:
        """Drop it."""

    async def close(self, timeout_s: float = 2.0) -> None:
        """Nothing to close."""


def member(incarnation: str, node: str = "p0", read: float = 0.0) -> Member:
    peer = PeerInfo(
        engine="pe0", incarnation=incarnation, agent_metadata=b"",
        buffer=BufferInfo(base_address=0, slot_bytes=1, slots=1),
    )  # fmt: skip
    fingerprint = Fingerprint(
        model="m", revision="", dtype="x", num_layers=1, token_layer_bytes=1, block_tokens=64,
        layout_id="l",
    )  # fmt: skip
    hello = Hello(
        peer=peer, role=Role.PREFILL.value, rank=0, node=node, pid=0, host_id="elsewhere",
        http_url="http://127.0.0.1:1", fingerprint=fingerprint, max_batched_tokens=1,
        stats=EngineStats(counters={"read": read, f"of {incarnation}": 1.0}),
    )  # fmt: skip
    return Member(hello, Silent())


async def test_totals_of_many_restarts(tmp_path: Path) -> None:
    front = Front(make_config(tmp_path, prefill=2))
    await front.start()
    members = front.members
    try:
        for number in range(50):
            engine = member(str(number))
            members.join(engine)
            members.heard(engine, EngineStats(counters={"read": 10.0}))
            assert members.total("read") == {"p0": 10 * (number + 1)}
            if number % 2:  # a connection that broke: it counts on from where it was
                members.leave(engine, "test")
                assert members.total("read") == {"p0": 10 * (number + 1)}
                engine = member(str(number), read=10.0)
                members.join(engine)
                assert members.total("read") == {"p0": 10 * (number + 1)}
            members.leave(engine, "test")
            assert members.total("read") == {"p0": 10 * (number + 1)}
            assert len(members._past) == 1
        # The same name on another node, where it was moved.
        members.join(member("moved", "p1", read=3.0))
        assert members.total("read") == {"p0": 500, "p1": 3}
        assert msgspec.json.encode(members.total("nothing of that name"))
    finally:
        await front.close()
