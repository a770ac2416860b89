"""A request on a decode engine: D1, the DE buffer, P5 / D5, and making blocks durable.

The DE buffer's slots of a request are written by two others, the store (D1) and the PE (P4, D4).
The slots therefore count as under I/O from the moment the PE may be told about them until the
front says that the PE is done (``GoDecode``) or that it will never write again (``Close``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from dualpath.blocks import extend_keys
from dualpath.control.messages import (
    Allocated,
    BlockRef,
    Closed,
    OpenDecode,
    Opened,
    Published,
    TurnDurable,
)
from dualpath.storage import BlockId
from dualpath.transfer.block_map import BlockMap
from dualpath.transfer.copying import Fence
from dualpath.transfer.errors import PoolTimeout, PoolTooSmall
from dualpath.transfer.loads import DeviceUse, LayerLoad
from dualpath.transfer.restores import Restores
from dualpath.transfer.services import Services, block_ids
from dualpath.transfer.slots import IoToken, Lease

logger = logging.getLogger(__name__)

_PROMPT = ""
"""Name of the prompt's chain among those of the answers."""


@dataclass(frozen=True, slots=True)
class PersistBlock:
    """A block completed by decoding: where it lies in the cache, and its tokens."""

    index: int
    engine_blocks: tuple[int, ...]
    tokens: tuple[int, ...]


_Waiting = tuple[str, PersistBlock, DeviceUse, Sequence[Fence]]
"""vLLM's request, a block of it, who counts its use, when it is complete on the device."""


class DecodeSession:
    """One request's KV on a DE. Every method runs in the traffic thread."""

    def __init__(self, services: Services, message: OpenDecode) -> None:
        self._services = services
        self.spec = message.spec
        self._first, self._last = message.read
        self.owner = f"{self.spec.rid}#{self.spec.attempt}"
        self.prefill_engine = message.prefill_engine
        self._sequences = message.sequences
        self._chains: dict[str, list[bytes]] = {}
        self._lease: Lease | None = None
        self._remote_io: IoToken | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._loads: set[LayerLoad] = set()
        self._waiting: list[_Waiting] = []
        self._persisting = 0
        self._persister: asyncio.Task[None] | None = None
        self._skipped = 0
        self._ready = False
        self._went = asyncio.Event()
        self._loaded = 0
        self._expects_vllm = True
        self._ended = 0
        self._durable_sent = False
        self._closing = False
        self.remote_over = False
        self._pinned: dict[str, list[bytes]] = {}
        self._to_store: frozenset[int] = frozenset()
        self._restores = Restores(services, self.owner, self.spec.root)
        self._all_stored = asyncio.Event()
        self._all_stored.set()
        self.closed = asyncio.Event()

    # ---- opening ----------------------------------------------------------------------------

    def open(self) -> None:
        """Take room for the whole prompt, answer ``Allocated``, read, answer ``Opened``."""
        self._services.spawn(self._open(), f"open {self.owner}", self._tasks)

    async def _open(self) -> None:
        services = self._services
        blocks = services.layout.blocks_for_tokens(self.spec.prompt_tokens)
        start = time.monotonic()
        slots: list[int] = []
        try:
            if not self.spec.bypass:
                self._lease = await services.buffer.pool.allocate(
                    self.owner, blocks, services.timeouts.admission
                )
                self._remote_io = self._lease.begin_io(self._lease.slots)
                slots = list(self._lease.slots)
        except (PoolTooSmall, PoolTimeout) as error:
            services.send(
                Opened(
                    rid=self.spec.rid,
                    attempt=self.spec.attempt,
                    error=str(error),
                    permanent=isinstance(error, PoolTooSmall),
                )
            )
            return
        wait_s = time.monotonic() - start
        services.send(
            Allocated(rid=self.spec.rid, attempt=self.spec.attempt, slots=slots, wait_s=wait_s)
        )
        if self.spec.hit_blocks and self._lease is not None:
            # For both sides and until the end: what is computed now is to stand on it.
            await self._pin(_PROMPT, self.spec.keys[self.spec.hit_blocks - 1])
        start = time.monotonic()
        good = self._last - self._first
        if good and self._lease is not None:
            ids = block_ids(self.spec.root, self.spec.keys, self._first, self._last)
            good = await services.read_blocks(
                self.spec.root, ids, self._lease, self._lease.slots[self._first : self._last]
            )
            services.counters["de_path_read_bytes"] += good * services.layout.full_block_bytes
            services.draw("read", self.owner, start, blocks=good)
        services.send(
            Opened(
                rid=self.spec.rid,
                attempt=self.spec.attempt,
                good_blocks=good,
                wait_s=wait_s,
                read_s=time.monotonic() - start,
            )
        )

    async def _pin(self, chain: str, key: bytes) -> None:
        """Keep the stored chain up to ``key`` from eviction, from before ``key`` is there."""
        self._pinned.setdefault(chain, []).append(key)
        await self._services.pin_chain(self.spec.root, key)

    def _unpin(self, chain: str, *, newest: bool) -> None:
        """Of a chain's pins keep one: the newest, or (when it was not stored) the one before."""
        pins = self._pinned[chain]
        if len(pins) > 1:
            self._services.unpin_chain(self.spec.root, pins.pop(-1 if newest else 0))

    def _unpin_all(self) -> None:
        for pins in self._pinned.values():
            for key in pins:
                self._services.unpin_chain(self.spec.root, key)
        self._pinned.clear()

    # ---- the buffer is complete ------------------------------------------------------------------

    def go(self, good_blocks: int, *, decode: bool) -> None:
        """The PE is done: every slot holds its block. Make the new Full Blocks durable."""
        if self._ready or self._closing:
            return
        self._ready = True
        self._went.set()
        self._expects_vllm = decode
        if self._remote_io is not None:
            self._remote_io.end()
            self._remote_io = None
        full = self._services.layout.full_blocks_in(self.spec.prompt_tokens)
        if full > good_blocks:
            ids = block_ids(self.spec.root, self.spec.keys, good_blocks, full)
            self._begin_persist()
            if self._lease is not None:
                self._to_store = frozenset(self._lease.slots[good_blocks:full])
            self._spawn(self._persist_prompt(ids, good_blocks, full), f"persist {self.owner}")
        if not decode:
            self._maybe_release()
        self._maybe_durable()

    async def _persist_prompt(self, ids: Sequence[BlockId], first: int, last: int) -> None:
        try:
            if not self.spec.persist:
                self._announce(ids)
            elif self._lease is not None:
                await self._pin(_PROMPT, ids[-1].key)
                skipped = await self._services.write_blocks(
                    self.spec.root, ids, self._lease, self._lease.slots[first:last],
                    self._services.buffer,
                )  # fmt: skip
                self._unpin(_PROMPT, newest=bool(skipped))
                self._skipped += skipped
        finally:
            self._to_store = frozenset()
            self._maybe_release()
            self._end_persist()

    def _announce(self, ids: Sequence[BlockId]) -> None:
        """Oracle mode: the index learns of the blocks although nothing was written."""
        refs = [BlockRef(key=block.key, parent=block.parent) for block in ids]
        self._services.send(Published(root=self.spec.root, blocks=refs))

    # ---- P5 / D5 -----------------------------------------------------------------------------

    def load(self, load: LayerLoad, use: DeviceUse) -> None:
        """Copy the prompt's KV into the device cache, then give the buffer back."""
        self._loads.add(load)
        task = self._services.spawn(self._run_load(load), f"load {self.owner}", self._tasks)

        def over(done: asyncio.Task[None]) -> None:
            self._loads.discard(load)
            use.leave()
            load.fail("the session was closed" if done.cancelled() else "the load ended early")
            self._restores.release(load.request_id)
            self._maybe_release()

        task.add_done_callback(over)

    async def _run_load(self, load: LayerLoad) -> None:
        services = self._services
        layers = services.layout.num_layers
        if self.spec.bypass:
            load.advance(layers)
            return
        # vLLM's request and the front's word that the buffer is complete come over different
        # connections: either may be first.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(services.timeouts.layer):
                await self._went.wait()
        restored = self._restores.lease(load.request_id)
        lease = restored or self._lease
        if not self._ready or lease is None:
            services.counters["loads_failed"] += 1
            load.fail("the decode buffer does not hold this prompt")
            return
        places = BlockMap(
            services.cache,
            [block.engine_blocks for block in load.blocks],
            [services.buffer.address(lease.slots[block.index]) for block in load.blocks],
        )
        for layer in range(layers):
            started_s = time.monotonic()
            offset = services.layout.layer_offset_bytes(layer)
            await services.copy_for_load(load, places.into_cache(layer, offset))
            services.draw("load", f"layer {layer}", started_s, session=self.owner)
            load.advance(layer + 1)
        if restored is None:
            self._loaded += 1

    def _maybe_release(self) -> None:
        """The buffer is given back once its bytes are in the cache (or never will be needed);
        slots that are being written to storage, or will be, stay owned until that is over."""
        if self._lease is None or self._loads or not self._ready:
            return
        if self._loaded >= self._sequences or self._vllm_over or not self._expects_vllm:
            self._lease.release(self._lease.held - self._to_store)

    @property
    def _vllm_over(self) -> bool:
        return self._ended >= self._sequences

    # ---- durability ----------------------------------------------------------------------------

    def persist(
        self,
        request_id: str,
        blocks: Sequence[PersistBlock],
        use: DeviceUse,
        after: Sequence[Fence] = (),
    ) -> None:
        """Blocks completed by decoding one of the answers, vLLM's request ``request_id``. ``use``
        was entered once per block. They are complete when the device has reached ``after``."""
        if self._closing:
            use.leave(len(blocks))
            return
        for block in blocks:
            self._waiting.append((request_id, block, use, after))
        self._begin_persist(len(blocks))
        if self._persister is None:
            self._persister = self._spawn(self._persist_device(), f"persist {self.owner}")

    async def _persist_device(self) -> None:
        """Copy completed blocks out of the cache and write them, oldest first."""
        services = self._services
        try:
            while self._waiting:
                count = min(len(self._waiting), services.batch_blocks, services.staging.pool.slots)
                lease = await services.staging.pool.allocate(
                    self.owner, count, services.timeouts.admission
                )
                with lease:
                    # What was dropped while we waited for room is not here any more.
                    batch = self._waiting[:count]
                    del self._waiting[:count]
                    count = len(batch)
                    ids = await self._copy_out(batch, lease)
                    if self.spec.persist:
                        tips = {
                            entry[0]: block.key for entry, block in zip(batch, ids, strict=True)
                        }
                        for request_id, key in tips.items():
                            await self._pin(request_id, key)
                        skipped = await services.write_blocks(
                            self.spec.root, ids, lease, lease.slots, services.staging
                        )
                        for request_id in tips:
                            self._unpin(request_id, newest=bool(skipped))
                        self._skipped += skipped
                    else:
                        self._announce(ids)
                self._end_persist(count)
        except PoolTimeout as error:
            logger.warning("%s: %d blocks not stored: %s", self.owner, len(self._waiting), error)
            self._drop_waiting()
        finally:
            self._persister = None

    async def _copy_out(self, batch: Sequence[_Waiting], lease: Lease) -> list[BlockId]:
        services = self._services
        ids = [self._identify(request_id, block) for request_id, block, _, _ in batch]
        places = BlockMap(
            services.cache,
            [block.engine_blocks for _, block, _, _ in batch],
            [services.staging.address(slot) for slot in lease.slots[: len(batch)]],
        )
        fences = list({id(fence): fence for entry in batch for fence in entry[3]}.values())
        token = lease.begin_io(lease.slots)
        future = services.copy(places.all_out_of_cache(), fences)

        def copied(_: object) -> None:
            token.end()
            for _, _, use, _ in batch:
                use.leave()

        future.add_done_callback(copied)
        moved = await asyncio.shield(future)
        services.counters["device_to_host_bytes"] += moved
        return ids

    def _identify(self, request_id: str, block: PersistBlock) -> BlockId:
        """Key of a block, extending the chain of its own answer. Blocks of an answer come in
        order, without gaps; one that comes again keeps its key, because its tokens are the same."""
        root, size = self.spec.root, self._services.layout.block_tokens
        chain = self._chains.setdefault(request_id, list(self.spec.keys))
        if block.index == len(chain):
            chain += extend_keys(chain[-1] if chain else root, block.tokens, size)
        return block_ids(root, chain, block.index, block.index + 1)[0]

    def _drop_waiting(self) -> None:
        self._drop(list(self._waiting))

    def _drop(self, dropped: Sequence[_Waiting]) -> None:
        for entry in dropped:
            self._waiting.remove(entry)
            entry[2].leave()
        self._skipped += len(dropped)
        self._services.counters["persist_dropped_blocks"] += len(dropped)
        self._end_persist(len(dropped))

    def forget_device(self, request_id: str) -> None:
        """vLLM is about to reuse the request's cache blocks (preemption): what has not been
        copied out yet is given up. Copies in progress end by themselves."""
        self._drop([entry for entry in self._waiting if entry[0] == request_id])

    def restore(self, request_id: str, tokens: int, told: Callable[[str, int], None]) -> None:
        """vLLM has preempted an answer of which ``tokens`` tokens had KV: read its stored blocks
        back into the buffer, where a ``load`` of that request then finds them.

        ``told`` is called once, in this thread, whatever happens: the request and how many leading
        blocks the buffer holds now.
        """
        if self._closing or self.spec.bypass or not self.spec.persist:
            told(request_id, 0)
            return
        good = 0

        async def work() -> None:
            nonlocal good
            good = await self._restore(request_id, tokens)

        # Not at the end of ``work``: a task that is cancelled before it ran never gets there.
        task = self._spawn(work(), f"restore {self.owner}")
        task.add_done_callback(lambda _: told(request_id, good))

    async def _restore(self, request_id: str, tokens: int) -> int:
        size = self._services.layout.block_tokens
        try:
            async with asyncio.timeout(self._services.timeouts.layer):
                await self._all_stored.wait()
                # Only what was copied out of the cache has a key.
                chain = self._chains.get(request_id, self.spec.keys)
                count = min(len(chain), tokens // size)
                return await self._restores.read(
                    request_id, block_ids(self.spec.root, chain, 0, count)
                )
        except (TimeoutError, PoolTimeout, PoolTooSmall) as error:
            reason = str(error) or "not read back in time"
            logger.warning("%s: computing a preempted answer again: %s", self.owner, reason)
            return 0

    def vllm_finished(self) -> None:
        """One of vLLM's requests is over; no more blocks of it come."""
        self._ended += 1
        self._maybe_release()
        self._maybe_durable()

    def _begin_persist(self, count: int = 1) -> None:
        self._persisting += count
        if self._persisting:
            self._all_stored.clear()

    def _end_persist(self, count: int = 1) -> None:
        self._persisting -= count
        if not self._persisting:
            self._all_stored.set()
        self._maybe_durable()

    def _maybe_durable(self) -> None:
        over = self._vllm_over or not self._expects_vllm
        if self._ready and over and not self._persisting and not self._durable_sent:
            self._durable_sent = True
            if not self._closing:
                self._services.send(
                    TurnDurable(rid=self.spec.rid, attempt=self.spec.attempt, skipped=self._skipped)
                )

    # ---- ending ---------------------------------------------------------------------------------

    def close(self, reason: str, *, remote_over: bool = True) -> None:
        """End the session.

        ``remote_over`` says that the PE will not write any more. Without that word (the front
        is gone) the slots stay owned until ``remote_gone`` is called. The word may come later, by
        another call.
        """
        self.remote_over = self.remote_over or remote_over
        if not self._closing:
            self._closing = True
            self._spawn(self._close(reason), f"close {self.owner}")

    async def remote_gone(self) -> None:
        """The PE is known to do no more I/O on this session: end its claim on the slots.

        What a dead or disconnected PE had sent may still lie in this machine's sockets and would
        land at the next look at them; so look first, and only then let go of the memory.
        """
        if self._remote_io is not None:
            await self._services.agent.drain()
            self._remote_io.end()
            self._remote_io = None

    @property
    def holds_remote(self) -> bool:
        """Slots are still promised to a PE."""
        return self._remote_io is not None

    async def _close(self, reason: str) -> None:
        for load in list(self._loads):
            load.fail(reason)
        self._drop_waiting()
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        self._restores.release_all()
        self._unpin_all()
        if self.remote_over:
            await self.remote_gone()
        self.closed.set()
        self._services.send(Closed(rid=self.spec.rid, attempt=self.spec.attempt))

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        return self._services.spawn(coroutine, name, self._tasks)
