"""What the sessions of one engine share: memory, ledgers, store, peers, threads, counters."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from dualpath.blocks import BlockLayout
from dualpath.config import EngineConfig, TimeoutConfig
from dualpath.control.messages import BlockRef, Dropped, Message, PeerInfo, Published
from dualpath.spans import Spans
from dualpath.storage import BlockId, ReadStatus, Store, WriteStatus
from dualpath.transfer.agent import PeerAgent
from dualpath.transfer.copy_thread import CopyThread
from dualpath.transfer.copying import Fence
from dualpath.transfer.descriptors import Descriptors
from dualpath.transfer.hbm import CopyEngine, DeviceCache
from dualpath.transfer.loads import LayerLoad
from dualpath.transfer.memory import Region
from dualpath.transfer.regions import Regions
from dualpath.transfer.slots import Lease, SlotPool

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SessionError(RuntimeError):
    """A session cannot go on; ``permanent`` when trying again cannot help."""

    def __init__(self, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


@dataclass(slots=True)
class Arena:
    """A region cut into equal slots, and the ledger of who owns them."""

    region: Region
    pool: SlotPool

    def address(self, slot: int) -> int:
        """Address of a slot."""
        return self.region.address + slot * self.pool.slot_bytes

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        return self.region.view(slot * self.pool.slot_bytes, self.pool.slot_bytes)


@dataclass(slots=True)
class Services:
    """Shared by all sessions of one engine. Belongs to the traffic thread.

    Attributes:
        buffer: the PE or DE buffer, in Full Blocks.
        staging: a PE's landing memory (Layer Blocks) or a DE's persist memory (Full Blocks).
        send: queues a message to the front.
        regions: of a PE whose layers take turns in its memory, else None.
        spans: where transfers are drawn, if anywhere.
        on_crash: takes the engine out of service when a background task dies unexpectedly.
        copies: between buffers and cache, for all sessions.
        readers, writers, pinners: one thread each. Storage reads of different requests
            take turns batch by batch, because each batch is queued separately.
        read_queue_tokens: tokens waiting in, or being read by, storage reads.
        read_wait_s: time that batches of reads have waited for their turn, in all.
    """

    layout: BlockLayout
    cache: DeviceCache
    copy_engine: CopyEngine
    buffer: Arena
    staging: Arena
    agent: PeerAgent
    store: Store
    timeouts: TimeoutConfig
    engine: EngineConfig
    batch_blocks: int
    send: Callable[[Message], None]
    on_crash: Callable[[str], None]
    regions: Regions | None = None
    spans: Spans | None = None
    peers: dict[str, PeerInfo] = field(default_factory=dict)
    counters: Counter[str] = field(default_factory=Counter)
    read_queue_tokens: int = 0
    read_wait_s: float = 0.0
    _unpinned: list[tuple[bytes, bytes]] = field(default_factory=list)
    readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "dualpath-read")
    )
    writers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "dualpath-write")
    )
    pinners: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "dualpath-pin")
    )
    copies: CopyThread = field(init=False)

    def __post_init__(self) -> None:
        self.copies = CopyThread(lambda: self.copy_engine)

    def spawn(
        self, work: Coroutine[None, None, None], name: str, tasks: set[asyncio.Task[None]]
    ) -> asyncio.Task[None]:
        """Start a background task that is kept in ``tasks`` while it runs. One that dies of an
        error nobody handled takes the engine out of service: nothing fails silently."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        tasks.add(task)

        def over(done: asyncio.Task[None]) -> None:
            tasks.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                logger.error("task %r died", name, exc_info=error)
                self.on_crash(f"task {name!r} died: {type(error).__name__}: {error}")

        task.add_done_callback(over)
        return task

    def in_pool(
        self, pool: ThreadPoolExecutor, work: Callable[..., T], *args: object
    ) -> asyncio.Future[T]:
        """Run ``work`` in a pool's thread. Shield the future where ``work`` must not be called
        back. An error takes the engine out of service also when nobody waits for it any more."""
        future = asyncio.get_running_loop().run_in_executor(pool, work, *args)

        def over(done: asyncio.Future[T]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                thread = pool._thread_name_prefix
                logger.error("work in thread %r failed", thread, exc_info=error)
                what = f"{type(error).__name__}: {error}"
                self.on_crash(f"work in thread {thread!r} failed: {what}")

        future.add_done_callback(over)
        return future

    async def _in_thread(
        self, pool: ThreadPoolExecutor, lease: Lease, slots: Sequence[int], work: Callable[[], T]
    ) -> T:
        """Run blocking I/O on slots in a thread. The slots keep their owner until the thread is
        done with them, also when the awaiting task is cancelled meanwhile."""
        token = lease.begin_io(list(slots))
        future = self.in_pool(pool, work)
        future.add_done_callback(lambda _: token.end())
        return await asyncio.shield(future)

    async def pin_chain(self, root: bytes, key: bytes) -> None:
        """Keep the stored chain up to ``key`` from eviction until ``unpin_chain``, which must
        follow even when this is cancelled. Serving goes on when it cannot be done."""

        def work() -> None:
            try:
                self.store.pin(root, key, time.monotonic() + self.timeouts.storage)
            except OSError as error:
                # Nothing was pinned; an eviction in time would show as a missing block.
                self._unpinned.append((root, key))
                logger.warning("a chain is not protected from eviction: %s", error)

        if self.store.evicts:
            await asyncio.shield(self.in_pool(self.pinners, work))

    def unpin_chain(self, root: bytes, key: bytes) -> None:
        """Undo one ``pin_chain``. The same thread does both, in this order."""

        def work() -> None:
            if (root, key) in self._unpinned:
                self._unpinned.remove((root, key))
            else:
                self.store.unpin(root, key)

        if self.store.evicts:
            self.in_pool(self.pinners, work)

    async def read_blocks(
        self, root: bytes, blocks: Sequence[BlockId], lease: Lease, slots: Sequence[int]
    ) -> int:
        """Read blocks into slots of the lease, batch by batch (P1, D1).

        Returns:
            How many leading blocks are good. Reading stops at the first that is not.
        """
        tokens = len(blocks) * self.layout.block_tokens
        self.read_queue_tokens += tokens
        good = 0
        try:
            for start in range(0, len(blocks), self.batch_blocks):
                batch = blocks[start : start + self.batch_blocks]
                taken = slots[start : start + len(batch)]
                views = [self.buffer.view(slot) for slot in taken]
                queued_s = time.monotonic()
                waited_s: list[float] = []

                def work(
                    batch: Sequence[BlockId] = batch,
                    views: list[memoryview] = views,
                    queued_s: float = queued_s,
                    waited_s: list[float] = waited_s,
                ) -> list[ReadStatus]:
                    waited_s.append(time.monotonic() - queued_s)
                    # The clock starts when the batch's turn comes, not while it queues.
                    return self.store.read(
                        root, batch, views, time.monotonic() + self.timeouts.storage
                    )

                statuses = await self._in_thread(self.readers, lease, taken, work)
                self.read_wait_s += waited_s[0]
                done = len(batch) * self.layout.block_tokens
                self.read_queue_tokens -= done
                tokens -= done
                for block, status in zip(batch, statuses, strict=True):
                    if status is not ReadStatus.OK:
                        self.counters[f"storage_read_{status.name.lower()}_blocks"] += 1
                        if status in (ReadStatus.MISSING, ReadStatus.CORRUPT):
                            self.send(Dropped(root=root, keys=[block.key], reason=status.name))
                        return good
                    good += 1
            return good
        finally:
            self.read_queue_tokens -= tokens

    async def write_blocks(
        self,
        root: bytes,
        blocks: Sequence[BlockId],
        lease: Lease,
        slots: Sequence[int],
        arena: Arena,
    ) -> int:
        """Persist blocks from slots and announce those that are durable.

        Returns:
            How many could not be stored. Serving goes on without them.
        """
        skipped = 0
        for start in range(0, len(blocks), self.batch_blocks):
            batch = blocks[start : start + self.batch_blocks]
            taken = slots[start : start + len(batch)]
            views = [arena.view(slot) for slot in taken]

            def work(
                batch: Sequence[BlockId] = batch, views: list[memoryview] = views
            ) -> list[WriteStatus]:
                return self.store.write(
                    root, batch, views, time.monotonic() + self.timeouts.storage
                )

            statuses = await self._in_thread(self.writers, lease, taken, work)
            # Before what was published: a block may have gone and come back.
            for evicted_root, keys in self.store.take_evicted().items():
                self.send(Dropped(root=evicted_root, keys=keys, reason="EVICTED"))
            durable = []
            for block, status in zip(batch, statuses, strict=True):
                if status in (WriteStatus.PUBLISHED, WriteStatus.PRESENT):
                    durable.append(BlockRef(key=block.key, parent=block.parent))
                else:
                    skipped += 1
                    self.counters[f"storage_write_{status.name.lower()}_blocks"] += 1
            if durable:
                self.send(Published(root=root, blocks=durable))
        return skipped

    async def copy_for_load(
        self, load: LayerLoad, runs: Descriptors, after: Sequence[Fence] = ()
    ) -> None:
        """Copy into the device cache on behalf of ``load``, unless it is over. The device has to
        have reached every fence of ``after``, and of the load, first."""
        if not len(runs):
            return

        moved = await self.copy(
            runs, (*after, *load.after), enter=load.enter_copy, leave=load.leave_copy
        )
        self.counters["host_to_device_bytes"] += moved

    def copy(
        self,
        runs: Descriptors,
        after: Sequence[Fence] = (),
        enter: Callable[[], bool] = lambda: True,
        leave: Callable[[int], None] = lambda nbytes: None,
    ) -> asyncio.Future[int]:
        """See ``CopyThread.copy``. Shield the future where the result counts. A failure takes the
        engine out of service, also when nobody waits for it any more."""
        loop = asyncio.get_running_loop()
        copied = self.copies.copy(runs, after, enter, leave)

        def over(done: Future[int]) -> None:
            if (error := done.exception()) is not None:
                loop.call_soon_threadsafe(self.on_crash, f"a copy failed: {error}")

        copied.add_done_callback(over)
        return asyncio.wrap_future(copied)

    def draw(self, kind: str, name: str, started_s: float, **facts: object) -> None:
        """Show on the timeline what began at ``started_s`` (monotonic) and has ended now."""
        if self.spans is not None:
            self.spans.lane(kind, name, started_s, time.monotonic(), facts)

    def shutdown(self) -> None:
        """Stop the threads, what they are doing ends first, and give the copy engine back."""
        for pool in (self.readers, self.writers, self.pinners):
            pool.shutdown(wait=True, cancel_futures=True)
        self.copies.close()


def block_ids(root: bytes, keys: Sequence[bytes], first: int, last: int) -> list[BlockId]:
    """Blocks ``first .. last`` of a chain, each with its parent."""
    return [
        BlockId(key=keys[index], parent=keys[index - 1] if index else root)
        for index in range(first, last)
    ]
