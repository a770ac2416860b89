"""A request on a prefill engine: P1 and P2, or D2, then P4 / D4.

States of what a session owns are in docs/dataflow.md. In short: buffer slots hold the blocks this
side reads; they are released when their bytes are in the DE's buffer (or the session closes). All
transfers between the two engines are asked for here, by the PE. ``Closed`` follows the last one
that settles, and so proves that nothing will be written into the DE's slots any more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator, Sequence

from dualpath.control.messages import Closed, Opened, OpenPrefill, PrefillDone
from dualpath.transfer.agent import Op, Transfer
from dualpath.transfer.block_map import BlockMap
from dualpath.transfer.copying import Fence, until_reached
from dualpath.transfer.descriptors import Ints
from dualpath.transfer.errors import PoolTimeout, PoolTooSmall, TransferError
from dualpath.transfer.exports import Exports, NoRoom, PushBlock
from dualpath.transfer.loads import DeviceUse, LayerLoad
from dualpath.transfer.prefill_loads import PrefillLoads
from dualpath.transfer.services import Services, SessionError, block_ids
from dualpath.transfer.slots import Lease

logger = logging.getLogger(__name__)


class PrefillSession:
    """One request's KV on a PE. Every method runs in the traffic thread."""

    def __init__(self, services: Services, message: OpenPrefill) -> None:
        self._services = services
        self.spec = message.spec
        self._first, self._last = message.read
        self._peer = f"{message.decode_engine}/{message.decode_incarnation}"
        self._decode = services.peers.get(message.decode_engine)
        if self._decode is not None and self._decode.incarnation != message.decode_incarnation:
            self._decode = None
        self._slots = message.slots
        self.owner = f"{self.spec.rid}#{self.spec.attempt}"
        self._lease: Lease | None = None
        self._good = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self._transfers: set[Transfer] = set()
        self._error = ""
        self._closing = False
        self._finished = False
        self._done_sent = False
        self._hits_pushed = message.read[0] >= message.read[1]
        blocks = services.layout.blocks_for_tokens(self.spec.prompt_tokens)
        self._total_blocks = blocks
        self._owed: list[set[int]] | None = None  # per layer: blocks not in the DE buffer yet
        self._push_from = self.spec.hit_blocks
        self._outstanding = 0
        self._loads = PrefillLoads(services, self)
        self._exports: Exports | None = None
        if services.regions is not None and not self.spec.bypass:
            self._exports = Exports(services, self.owner, services.regions)
        self.closed = asyncio.Event()

    # ---- opening ----------------------------------------------------------------------------

    def open(self) -> None:
        """Take buffer room, read this side's blocks, answer ``Opened``."""
        self._services.spawn(self._open(), f"open {self.owner}", self.tasks)

    async def _open(self) -> None:
        wait_s = read_s = 0.0
        try:
            if self._decode is None:
                raise SessionError(f"decode engine {self._peer} is not known here")
            if self._services.regions is not None and not self.spec.layerwise:
                raise SessionError(
                    "layers take turns in this engine's memory (engine.layer_aliasing): it cannot "
                    "load all of them at once",
                    permanent=True,
                )
            count = self._last - self._first
            if self.spec.bypass:
                self._good = count
            elif room := count + self._computed_blocks:
                start = time.monotonic()
                self._lease = await self._services.buffer.pool.allocate(
                    self.owner, room, self._services.timeouts.admission
                )
                wait_s = time.monotonic() - start
                start = time.monotonic()
                self._good = await self._read(self._lease, count)
                read_s = time.monotonic() - start
                if count:
                    self._services.draw("read", self.owner, start, blocks=self._good)
        except PoolTooSmall as error:
            self._refuse(str(error), permanent=True)
        except (PoolTimeout, SessionError) as error:
            self._refuse(str(error), permanent=isinstance(error, SessionError) and error.permanent)
        else:
            self._services.send(
                Opened(
                    rid=self.spec.rid,
                    attempt=self.spec.attempt,
                    good_blocks=self._good,
                    wait_s=wait_s,
                    read_s=read_s,
                )
            )

    @property
    def _computed_blocks(self) -> int:
        """Blocks that need room here because they are computed here and not kept in HBM."""
        return 0 if self._exports is None else self._total_blocks - self.spec.hit_blocks

    async def _read(self, lease: Lease, count: int) -> int:
        """P1; the number of leading blocks that are good."""
        good = 0
        if count:
            ids = block_ids(self.spec.root, self.spec.keys, self._first, self._last)
            good = await self._services.read_blocks(self.spec.root, ids, lease, lease.slots[:count])
            size = self._services.layout.full_block_bytes
            self._services.counters["pe_path_read_bytes"] += good * size
        if self._exports is not None:
            self._exports.reserve(lease, lease.slots[count:], self.spec.hit_blocks)
            self._exports.reserve(lease, lease.slots[good:count], self._first + good)
        return good

    def _refuse(self, reason: str, *, permanent: bool) -> None:
        self._services.send(
            Opened(rid=self.spec.rid, attempt=self.spec.attempt, error=reason, permanent=permanent)
        )

    # ---- P2 / D2: into the device cache --------------------------------------------------------

    def begin(self, hit_blocks: int) -> None:
        """vLLM begins the request, or begins it again, with ``hit_blocks`` verified blocks."""
        self._push_from = hit_blocks
        if self._exports is not None and not self._closing:
            try:
                self._exports.require(range(hit_blocks, self._total_blocks))
            except NoRoom as error:
                self.abandon(str(error))
        if self._owed is None:
            computed = range(hit_blocks, self._total_blocks)
            self._owed = [set(computed) for _ in range(self._services.layout.num_layers)]
        if not self._hits_pushed and self.spec.layerwise:
            self._push_hits(hit_blocks)

    def load(self, load: LayerLoad, use: DeviceUse) -> None:
        """Fill the cache with the load's blocks, layer after layer (P2, D2)."""
        if self.spec.bypass:
            load.advance(load.num_layers)
            use.leave()
        elif self._closing or self._error:
            load.fail(self._error or "the session was closed")
            use.leave()
        else:
            self._loads.start(load, use)

    def host_address(self, index: int) -> int | None:
        """Where block ``index`` lies in this side's buffer; None when it is in the DE's.

        Raises:
            SessionError: it is nowhere.
        """
        if index >= self._push_from:
            if self._exports is None or self._lease is None:
                raise SessionError(f"block {index} was computed here and not kept")
            return self._exports.address(index)
        if not self._first <= index < self._last:
            return None
        if self._lease is None:
            raise SessionError("the blocks read on this side are no longer held")
        return self._services.buffer.address(self._lease.slots[index - self._first])

    # ---- P4 / D4: into the DE's buffer ---------------------------------------------------------

    def push_layer(
        self,
        layer: int,
        blocks: Sequence[PushBlock],
        use: DeviceUse,
        after: Sequence[Fence] = (),
    ) -> None:
        """Write newly computed Layer Blocks of one layer into the DE's buffer.

        ``use`` was entered once for this call and is left when the cache is no longer read. The
        blocks are computed when the device has reached ``after``. Where layers take turns,
        ``Regions.export_begins`` was called, too.
        """
        if self._closing or self._error or not blocks or self.spec.bypass:
            if self.spec.bypass and not self._closing:
                self._note_pushed(layer, blocks)
            if self._services.regions is not None:
                self._services.regions.export_over(layer)
            use.leave()
            return
        if self._exports is not None:
            self._export(self._exports, layer, blocks, use, after)
            return
        services = self._services
        offset = services.layout.layer_offset_bytes(layer)
        places = BlockMap(
            services.cache,
            [block.engine_blocks for block in blocks],
            [self.remote_address(block.index) for block in blocks],
        )
        runs = places.out_of_cache(layer, offset)
        self._note_owed(layer, blocks)
        self._outstanding += 1
        started_s = time.monotonic()

        def submit() -> Transfer:
            return self.submit(Op.WRITE, runs.local, runs.remote, runs.sizes, None, ())

        # At once where nothing has to be awaited, so that a close finds it under way.
        started = None if after else submit()

        async def finish() -> None:
            try:
                for fence in after:
                    await until_reached(fence, services.timeouts.layer)
                await (started or submit()).wait(services.timeouts.transfer)
            except TransferError as error:
                self._fail(f"push of layer {layer} failed: {error}")
            else:
                services.counters["push_miss_bytes"] += places.nbytes
                services.draw("push", f"layer {layer}", started_s, session=self.owner)
                self._note_pushed(layer, blocks)
            finally:
                # The session is dead if this failed: the target range is never used, so the
                # source may be reused although its bytes may still be on their way.
                use.leave()
                self._outstanding -= 1
                self._maybe_done()

        self._spawn(finish(), f"push {self.owner} layer {layer}")

    def _export(
        self,
        exports: Exports,
        layer: int,
        blocks: Sequence[PushBlock],
        use: DeviceUse,
        after: Sequence[Fence],
    ) -> None:
        """``push_layer`` by way of the PE buffer: the region is free again as soon as the bytes
        are there, however slow the network is."""
        complete = [block for block in blocks if block.complete]
        self._note_owed(layer, blocks)
        copied = exports.copy_out(layer, blocks, after)
        self._outstanding += 1

        async def finish() -> None:
            try:
                await asyncio.shield(copied)
                if complete:
                    await self._push_copies(exports, layer, complete)
                    self._note_pushed(layer, complete)
            except TransferError as error:
                self._fail(f"push of layer {layer} failed: {error}")
            finally:
                use.leave()
                self._outstanding -= 1
                self._maybe_done()

        self._spawn(finish(), f"export {self.owner} layer {layer}")

    async def _push_copies(self, exports: Exports, layer: int, blocks: Sequence[PushBlock]) -> None:
        services = self._services
        offset = services.layout.layer_offset_bytes(layer)
        sizes = [
            len(block.engine_blocks) * services.layout.engine_layer_block_bytes for block in blocks
        ]
        started_s = time.monotonic()
        transfer = self.submit(
            Op.WRITE,
            [exports.address(block.index) + offset for block in blocks],
            [self.remote_address(block.index) + offset for block in blocks],
            sizes,
            None,
            (),
        )
        end_io = exports.begin_io(block.index for block in blocks)
        transfer.settled.add_done_callback(lambda _: end_io())
        await transfer.wait(services.timeouts.transfer)
        services.counters["push_miss_bytes"] += sum(sizes)
        services.draw("push", f"layer {layer}", started_s, session=self.owner)

    def _note_owed(self, layer: int, blocks: Sequence[PushBlock]) -> None:
        """A block that is computed again counts only when it was pushed again."""
        assert self._owed is not None
        self._owed[layer].update(block.index for block in blocks)

    def _note_pushed(self, layer: int, blocks: Sequence[PushBlock]) -> None:
        assert self._owed is not None
        self._owed[layer].difference_update(block.index for block in blocks)

    def _push_hits(self, hit_blocks: int) -> None:
        """P4 for hit blocks read on this side: whole Full Blocks, buffer to buffer.

        They need not pass through the cache: the bytes are the same, and one descriptor a block
        instead of one a layer is many times cheaper.
        """
        self._hits_pushed = True
        last = min(self._last, hit_blocks)
        if self.spec.bypass or self._lease is None or last <= self._first:
            return
        self._outstanding += 1
        self._spawn(self._push_hit_blocks(last), f"push hits {self.owner}")

    async def _push_hit_blocks(self, last: int) -> None:
        services = self._services
        lease = self._lease
        assert lease is not None
        started_s = time.monotonic()
        try:
            size = services.layout.full_block_bytes
            for start, stop in _chunks(self._first, last, services.batch_blocks):
                slots = lease.slots[start - self._first : stop - self._first]
                transfer = self.submit(
                    Op.WRITE,
                    [services.buffer.address(slot) for slot in slots],
                    [self.remote_address(index) for index in range(start, stop)],
                    [size] * len(slots),
                    lease,
                    slots,
                )
                await transfer.wait(services.timeouts.transfer)
                services.counters["push_hit_bytes"] += size * len(slots)
            services.draw("push", "hit blocks", started_s, session=self.owner)
        except TransferError as error:
            self._fail(f"push of hit blocks failed: {error}")
        finally:
            self._outstanding -= 1
            self._maybe_done()

    def remote_address(self, index: int) -> int:
        """Where block ``index`` lies in the DE's buffer."""
        assert self._decode is not None
        buffer = self._decode.buffer
        return buffer.base_address + self._slots[index] * buffer.slot_bytes

    def submit(
        self,
        op: Op,
        local: Ints,
        remote: Ints,
        sizes: Ints,
        lease: Lease | None,
        slots: Sequence[int],
    ) -> Transfer:
        """Start a transfer with the DE; ``slots`` of ``lease`` are kept until it is settled."""
        transfer = self._services.agent.submit(op, self._peer, local, remote, sizes)
        self._transfers.add(transfer)
        transfer.settled.add_done_callback(lambda _: self._transfers.discard(transfer))
        if lease is not None:
            token = lease.begin_io(list(slots))
            transfer.settled.add_done_callback(lambda _: token.end())
        return transfer

    # ---- ending -------------------------------------------------------------------------------

    def vllm_finished(self, ok: bool) -> None:
        """vLLM's request is over; after this no more pushes come."""
        self._finished = True
        if not ok:
            self._fail("the prefill was aborted")
        elif self._owed is None:
            self._fail("the prefill ended before it began")
        elif not self._hits_pushed:
            self._push_hits(self._push_from)
        self._maybe_done()

    def abandon(self, reason: str) -> None:
        """Give the prefill up: ``PrefillDone`` will say so, and nothing more is pushed."""
        self._fail(reason)
        self._maybe_done()

    def _fail(self, reason: str) -> None:
        if not self._error:
            self._error = reason
            if not self._closing:
                logger.warning("prefill %s failed: %s", self.owner, reason)
                self._services.counters["prefills_failed"] += 1

    def _maybe_done(self) -> None:
        if self._done_sent or self._closing or not (self._finished or self._error):
            return
        if not self._error:
            if self._outstanding:
                return
            assert self._owed is not None
            short = [min(owed) for owed in self._owed if owed]
            if short:
                self._fail(
                    f"{len(short)} layers are incomplete in the decode buffer "
                    f"(block {min(short)} of {self._total_blocks})"
                )
        self._done_sent = True
        self._services.send(
            PrefillDone(rid=self.spec.rid, attempt=self.spec.attempt, error=self._error)
        )
        if not self._error:
            self._release()

    def _release(self) -> None:
        if self._exports is not None:
            self._exports.release()
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def close(self, reason: str) -> None:
        """End the session; ``closed`` is set when nothing of it is under way any more."""
        if self._closing:
            return
        self._closing = True
        self._spawn(self._close(reason), f"close {self.owner}")

    async def _close(self, reason: str) -> None:
        self._loads.fail_all(reason)
        others = [task for task in self.tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._release()
        # Transfers cannot be called back. Wait until each is known to be over: only then may the
        # DE's slots be given to someone else, and Closed is what says so.
        while self._transfers:
            await asyncio.wait([transfer.settled for transfer in self._transfers])
        self.closed.set()
        self._services.send(Closed(rid=self.spec.rid, attempt=self.spec.attempt))

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        self._services.spawn(coroutine, name, self.tasks)


def _chunks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, size):
        yield start, min(start + size, last)


__all__ = ["PrefillSession", "PushBlock"]
