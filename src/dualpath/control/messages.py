"""Messages between the front and the engines.

One connection per engine, opened by the engine. Each message is a tagged msgspec struct in
MessagePack. ``rid`` is the front's request id and ``attempt`` counts its tries: together they name
a *session* on an engine. Everything said about a session that is closed, or about another
attempt, is ignored, which makes every message safe to repeat and safe to arrive late.

Life of a request (docs/dataflow.md has the pictures)::

    front -> DE  OpenDecode     DE buffer room for the whole prompt, then read ``read`` (D1)
    DE -> front  Allocated      slots of the whole prompt; the DE reads on
    front -> PE  OpenPrefill    PE buffer room for ``read``, then read it (P1)
    DE -> front  Opened         how many leading blocks of its range are good
    PE -> front  Opened
    front -> PE  (HTTP)         the vLLM request; P2..P4 or D2..D4 happen under it
    PE -> front  PrefillDone    every Layer Block of the prompt is in the DE buffer
    front -> DE  GoDecode       the DE may use the buffer: persist new blocks (D5/P5 follows)
    front -> DE  (HTTP)         the vLLM request, streamed to the client
    DE -> front  Published      blocks now durable, as they become so
    DE -> front  TurnDurable    all blocks of the request are durable (or given up, and counted)
    front -> PE  Close          the session is over: stop, and release what is not under I/O
    PE -> front  Closed         everything released and no transfer of it is under way any more
    front -> DE  Close          only after the PE's Closed (or the PE's death, or when no
                                OpenPrefill was ever sent): until then the PE may still write
                                into the DE's slots
    DE -> front  Closed
"""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 2


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every message."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """What two engines must agree on before they may exchange KV.

    ``layout_id`` names the physical byte order inside a Layer Block (see ``KeyRoot``).
    """

    model: str
    revision: str
    dtype: str
    num_layers: int
    token_layer_bytes: int
    block_tokens: int
    layout_id: str
    tp_size: int = 1

    def difference(self, other: Fingerprint) -> str | None:
        """First field that differs, as ``name: ours != theirs``; None when equal."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"{name}: {ours!r} != {theirs!r}"
        return None


class BufferInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's buffer lies: slot ``i`` starts at ``base_address + i * slot_bytes``."""

    base_address: int
    slot_bytes: int
    slots: int


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine needs to reach another. ``incarnation`` is new at every start."""

    engine: str
    incarnation: str
    agent_metadata: bytes
    buffer: BufferInfo


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's state at a report.

    Attributes:
        running, waiting: requests inside vLLM.
        read_queue_tokens: tokens waiting in, or being read by, this engine's storage reads.
        hbm_tokens_total, hbm_tokens_used: capacity and use of the KV cache, in tokens.
        buffer_slots_total, buffer_slots_used: the PE or DE buffer, in Full Blocks, and the
            landing or persist memory, in slots of its own.
        sessions: open sessions.
        transfers: submissions under way.
        counters: monotonic totals by metric name, e.g. ``storage_read_bytes``.
    """

    running: int = 0
    waiting: int = 0
    read_queue_tokens: int = 0
    hbm_tokens_total: int = 0
    hbm_tokens_used: int = 0
    buffer_slots_total: int = 0
    buffer_slots_used: int = 0
    sessions: int = 0
    transfers: int = 0
    counters: dict[str, float] = {}


# ---- engine -> front -------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """First message of a connection."""

    protocol: int = PROTOCOL_VERSION
    peer: PeerInfo
    role: str
    rank: int
    node: str
    pid: int
    host_id: str
    http_url: str
    fingerprint: Fingerprint
    max_batched_tokens: int
    layer_regions: int = 0
    """Of a PE whose layers take turns in its memory: how many layers' KV it holds; else 0."""
    stats: EngineStats
    weights_changed: bool = False
    """Its weights were replaced in place and no front has acknowledged that yet."""
    weights_in_place: bool = False
    """Its weights were replaced in place at some time in its life, acknowledged or not."""
    secret: str = ""


class Report(Message, frozen=True, kw_only=True):
    """Sent every fetch interval; doubles as the heartbeat.

    ``attention``: of each step of a PE with a single request since the last report: tokens cached,
    tokens computed, seconds of attention.
    """

    stats: EngineStats
    attention: list[tuple[int, int, float]] = []


class Allocated(Message, frozen=True, kw_only=True):
    """A DE's buffer has room for the whole prompt; block ``i`` belongs in ``slots[i]``."""

    rid: str
    attempt: int
    slots: list[int]
    wait_s: float = 0.0


class Opened(Message, frozen=True, kw_only=True):
    """Answer to OpenDecode and OpenPrefill.

    Attributes:
        good_blocks: leading blocks of the asked range that were read and verified.
        wait_s: seconds spent waiting for buffer room; read_s: seconds reading.
        error: why the session could not be opened (nothing is held then), else empty.
        permanent: with ``error``: no retry can help (the prompt is larger than the buffer).
    """

    rid: str
    attempt: int
    good_blocks: int = 0
    wait_s: float = 0.0
    read_s: float = 0.0
    error: str = ""
    permanent: bool = False


class PrefillDone(Message, frozen=True, kw_only=True):
    """Every Layer Block that the PE owed the DE has arrived; or ``error`` says why not."""

    rid: str
    attempt: int
    error: str = ""


class BlockRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A stored block: its key and its parent's (the root's digest for a first block)."""

    key: bytes
    parent: bytes


class Published(Message, frozen=True, kw_only=True):
    """Blocks that can now be read by anyone (``root`` is the namespace they lie in)."""

    root: bytes
    blocks: list[BlockRef]


class Dropped(Message, frozen=True, kw_only=True):
    """Blocks that are gone: found bad by a reader, or evicted."""

    root: bytes
    keys: list[bytes]
    reason: str


class TurnDurable(Message, frozen=True, kw_only=True):
    """All complete blocks of the request are published; ``skipped`` could not be."""

    rid: str
    attempt: int
    skipped: int = 0


class Closed(Message, frozen=True, kw_only=True):
    """Everything the session held is released."""

    rid: str
    attempt: int


class WeightsChanged(Message, frozen=True, kw_only=True):
    """This engine's weights were replaced in place: the weight epoch must advance.

    The engine waits for ``EpochAdvanced`` with the same ``serial`` before it reports the update
    as done, so that no request that starts afterwards can hit older KV.
    """

    how: str
    serial: int


class Failing(Message, frozen=True, kw_only=True):
    """A background part of the engine died: it must get no more work."""

    reason: str


# ---- front -> engine -------------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """The engine is a member of the cluster."""

    front: str
    report_interval_s: float
    weight_epoch: int


class Refused(Message, frozen=True, kw_only=True):
    """The engine may not join; the connection is closed after this."""

    reason: str


class PeerUp(Message, frozen=True, kw_only=True):
    """Another engine can be reached.

    Attributes:
        peer: how.
        quiet: it does no I/O of sessions that it had before this message. Not so when the receiver
            itself has connected again while such sessions are still being closed: the end of each
            is then said by ``Close``.
    """

    peer: PeerInfo
    quiet: bool = True


class PeerGone(Message, frozen=True, kw_only=True):
    """Another engine's process has ended: it will do no more I/O."""

    engine: str
    incarnation: str


class SessionSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What both sides of a request share.

    Attributes:
        root: namespace digest (parent of the first block).
        keys: keys of the prompt's complete blocks, in order.
        prompt_tokens: length of the prompt.
        hit_blocks: leading blocks that the index has.
        persist: whether new blocks are written (not in oracle mode).
        layerwise: overlap loads and pushes with compute, layer by layer; else all at once.
        bypass: oracle mode: move no bytes at all.
        deadline_s: seconds from now after which the session closes itself.
    """

    rid: str
    attempt: int
    root: bytes
    keys: list[bytes]
    prompt_tokens: int
    hit_blocks: int
    persist: bool = True
    layerwise: bool = True
    bypass: bool = False
    deadline_s: float = 600.0


class OpenDecode(Message, frozen=True, kw_only=True):
    """Take buffer room for the whole prompt, then read blocks ``read[0] .. read[1]``.

    ``prefill_engine`` is the PE that will write into the slots. ``sequences`` is how many answers
    vLLM will generate from them (``n``).
    """

    spec: SessionSpec
    read: tuple[int, int]
    prefill_engine: str = ""
    sequences: int = 1


class OpenPrefill(Message, frozen=True, kw_only=True):
    """Take buffer room for blocks ``read[0] .. read[1]`` and read them.

    The other hit blocks lie in the decode engine's buffer: block ``i`` in ``slots[i]`` of
    ``decode_engine`` (that ``incarnation`` only).
    """

    spec: SessionSpec
    read: tuple[int, int]
    decode_engine: str
    decode_incarnation: str
    slots: list[int]


class EpochAdvanced(Message, frozen=True, kw_only=True):
    """The weight epoch is durable at ``weight_epoch``; answers ``WeightsChanged``."""

    serial: int
    weight_epoch: int


class GoDecode(Message, frozen=True, kw_only=True):
    """The DE's buffer holds the whole prompt; ``good_blocks`` of it came from storage.

    ``decode`` is False when the first token was also the last: no vLLM request will follow, the
    DE only makes the prompt's new blocks durable and answers ``TurnDurable``.
    """

    rid: str
    attempt: int
    good_blocks: int
    decode: bool = True


class Close(Message, frozen=True, kw_only=True):
    """End the session. Ranges under I/O are kept until that I/O is known to be over."""

    rid: str
    attempt: int
    reason: str


ToFront = (
    Hello | Report | Allocated | Opened | PrefillDone | Published | Dropped | TurnDurable | Closed
    | WeightsChanged | Failing
)  # fmt: skip
ToEngine = (
    Welcome | Refused | PeerUp | PeerGone | EpochAdvanced | OpenDecode | OpenPrefill | GoDecode
    | Close
)  # fmt: skip
