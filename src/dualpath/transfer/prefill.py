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
from dataclasses import dataclass

from dualpath.control.messages import Closed, Opened, OpenPrefill, PrefillDone
from dualpath.transfer.agent import Op, Transfer
from dualpath.transfer.errors import PoolTimeout, PoolTooSmall, TransferError
from dualpath.transfer.hbm import Run, layer_runs
from dualpath.transfer.loads import DeviceUse, LayerLoad, LoadBlock
from dualpath.transfer.services import Services, SessionError, block_ids
from dualpath.transfer.slots import Lease

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushBlock:
    """A block computed on the PE: its index in the prompt and where it lies in the cache."""

    index: int
    engine_blocks: tuple[int, ...]


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._transfers: set[Transfer] = set()
        self._loads: set[LayerLoad] = set()
        self._error = ""
        self._closing = False
        self._finished = False
        self._done_sent = False
        self._hits_pushed = message.read[0] >= message.read[1]
        blocks = services.layout.blocks_for_tokens(self.spec.prompt_tokens)
        self._total_blocks = blocks
        self._pushed_to: list[int] | None = None  # per layer: blocks below are in the DE buffer
        self._push_from = self.spec.hit_blocks
        self._outstanding = 0
        self.closed = asyncio.Event()

    # ---- opening ----------------------------------------------------------------------------

    def open(self) -> None:
        """Take buffer room, read this side's blocks, answer ``Opened``."""
        self._services.spawn(self._open(), f"open {self.owner}", self._tasks)

    async def _open(self) -> None:
        wait_s = read_s = 0.0
        try:
            if self._decode is None:
                raise SessionError(f"decode engine {self._peer} is not known here")
            count = self._last - self._first
            if self.spec.bypass:
                self._good = count
            elif count:
                start = time.monotonic()
                self._lease = await self._services.buffer.pool.allocate(
                    self.owner, count, self._services.timeouts.admission
                )
                wait_s = time.monotonic() - start
                start = time.monotonic()
                ids = block_ids(self.spec.root, self.spec.keys, self._first, self._last)
                self._good = await self._services.read_blocks(
                    self.spec.root, ids, self._lease, self._lease.slots
                )
                read_s = time.monotonic() - start
                layout = self._services.layout
                self._services.counters["pe_path_read_bytes"] += (
                    self._good * layout.full_block_bytes
                )
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

    def _refuse(self, reason: str, *, permanent: bool) -> None:
        self._services.send(
            Opened(rid=self.spec.rid, attempt=self.spec.attempt, error=reason, permanent=permanent)
        )

    # ---- P2 / D2: into the device cache --------------------------------------------------------

    def begin(self, hit_blocks: int) -> None:
        """vLLM has admitted the request with ``hit_blocks`` verified blocks."""
        self._push_from = hit_blocks
        if self._pushed_to is None:
            self._pushed_to = [hit_blocks] * self._services.layout.num_layers
        if not self._hits_pushed and self.spec.layerwise:
            self._push_hits(hit_blocks)

    def load(self, load: LayerLoad, use: DeviceUse) -> None:
        """Fill the cache with the load's blocks, layer after layer (P2, D2)."""
        self._loads.add(load)
        task = self._services.spawn(self._run_load(load), f"load {self.owner}", self._tasks)

        def over(done: asyncio.Task[None]) -> None:
            self._loads.discard(load)
            use.leave()
            load.fail("the session was closed" if done.cancelled() else "the load ended early")

        task.add_done_callback(over)

    async def _run_load(self, load: LayerLoad) -> None:
        layers = self._services.layout.num_layers
        if self.spec.bypass:
            load.advance(layers)
            return
        local = [block for block in load.blocks if self._first <= block.index < self._last]
        remote = [block for block in load.blocks if not self._first <= block.index < self._last]
        window = min(layers, self._services.engine.prefetch_layers + 1)
        running: list[asyncio.Task[None]] = []
        try:
            for layer in range(layers):
                while len(running) < window and layer + len(running) < layers:
                    ahead = layer + len(running)
                    running.append(
                        asyncio.create_task(self._load_layer(load, ahead, local, remote))
                    )
                await running.pop(0)
                load.advance(layer + 1)
        except (TransferError, PoolTimeout, PoolTooSmall, SessionError) as error:
            self._services.counters["loads_failed"] += 1
            logger.warning("load of %s failed: %s", self.owner, error)
            load.fail(str(error))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _load_layer(
        self,
        load: LayerLoad,
        layer: int,
        local: Sequence[LoadBlock],
        remote: Sequence[LoadBlock],
    ) -> None:
        services = self._services
        offset = services.layout.layer_offset_bytes(layer)
        if local:
            if self._lease is None:
                raise SessionError("the blocks read on this side are no longer held")
            runs = []
            for block in local:
                host = (
                    services.buffer.address(self._lease.slots[block.index - self._first]) + offset
                )
                runs += [
                    Run(host_address, device, size)
                    for device, host_address, size in layer_runs(
                        services.cache, layer, block.engine_blocks, host
                    )
                ]
            await services.copy_for_load(load, runs)
        window = services.engine.prefetch_layers + 1
        chunk = max(1, services.staging.pool.slots // window)
        for start in range(0, len(remote), chunk):
            await self._pull(load, layer, offset, remote[start : start + chunk])

    async def _pull(
        self, load: LayerLoad, layer: int, offset: int, blocks: Sequence[LoadBlock]
    ) -> None:
        """D2: read one layer of some blocks out of the DE's buffer, by way of landing memory.

        Not straight into the cache: a read that outlives its deadline may still land, and landing
        slots stay owned until it has, which vLLM's cache blocks could not.
        """
        services = self._services
        assert self._decode is not None
        lease = await services.staging.pool.allocate(
            self.owner, len(blocks), services.timeouts.transfer
        )
        try:
            landing = [services.staging.address(slot) for slot in lease.slots]
            size = services.layout.layer_block_bytes
            transfer = self._submit(
                Op.READ,
                landing,
                [self._remote(block.index) + offset for block in blocks],
                [size] * len(blocks),
                lease,
                lease.slots,
            )
            await transfer.wait(services.timeouts.transfer)
            services.counters["d2_bytes"] += size * len(blocks)
            runs = []
            for block, host in zip(blocks, landing, strict=True):
                runs += [
                    Run(host_address, device, nbytes)
                    for device, host_address, nbytes in layer_runs(
                        services.cache, layer, block.engine_blocks, host
                    )
                ]
            await services.copy_for_load(load, runs)
        finally:
            lease.release()

    # ---- P4 / D4: into the DE's buffer ---------------------------------------------------------

    def push_layer(self, layer: int, blocks: Sequence[PushBlock], use: DeviceUse) -> None:
        """Write newly computed Layer Blocks of one layer into the DE's buffer.

        ``use`` was entered once for this call and is left when the cache is no longer read.
        """
        if self._closing or self._error or not blocks:
            use.leave()
            return
        if self.spec.bypass:
            self._note_pushed(layer, blocks)
            use.leave()
            return
        services = self._services
        offset = services.layout.layer_offset_bytes(layer)
        local: list[int] = []
        remote: list[int] = []
        sizes: list[int] = []
        for block in blocks:
            target = self._remote(block.index) + offset
            for device, address, size in layer_runs(
                services.cache, layer, block.engine_blocks, target
            ):
                local.append(device)
                remote.append(address)
                sizes.append(size)
        assert self._pushed_to is not None
        # A recomputed block lowers the mark first, so that it counts only when pushed again.
        self._pushed_to[layer] = min(self._pushed_to[layer], blocks[0].index)
        transfer = self._submit(Op.WRITE, local, remote, sizes, None, ())
        self._outstanding += 1

        async def finish() -> None:
            try:
                await transfer.wait(services.timeouts.transfer)
            except TransferError as error:
                self._fail(f"push of layer {layer} failed: {error}")
            else:
                services.counters["push_miss_bytes"] += sum(sizes)
                self._note_pushed(layer, blocks)
            finally:
                # The session is dead if this failed: the target range is never used, so the
                # source may be reused although its bytes may still be on their way.
                use.leave()
                self._outstanding -= 1
                self._maybe_done()

        self._spawn(finish(), f"push {self.owner} layer {layer}")

    def _note_pushed(self, layer: int, blocks: Sequence[PushBlock]) -> None:
        assert self._pushed_to is not None
        if self._pushed_to[layer] == blocks[0].index:
            self._pushed_to[layer] = blocks[-1].index + 1

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
        try:
            size = services.layout.full_block_bytes
            for start, stop in _chunks(self._first, last, services.batch_blocks):
                slots = lease.slots[start - self._first : stop - self._first]
                transfer = self._submit(
                    Op.WRITE,
                    [services.buffer.address(slot) for slot in slots],
                    [self._remote(index) for index in range(start, stop)],
                    [size] * len(slots),
                    lease,
                    slots,
                )
                await transfer.wait(services.timeouts.transfer)
                services.counters["push_hit_bytes"] += size * len(slots)
        except TransferError as error:
            self._fail(f"push of hit blocks failed: {error}")
        finally:
            self._outstanding -= 1
            self._maybe_done()

    def _remote(self, index: int) -> int:
        assert self._decode is not None
        buffer = self._decode.buffer
        return buffer.base_address + self._slots[index] * buffer.slot_bytes

    def _submit(
        self,
        op: Op,
        local: Sequence[int],
        remote: Sequence[int],
        sizes: Sequence[int],
        lease: Lease | None,
        slots: Sequence[int],
    ) -> Transfer:
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
        elif self._pushed_to is None:
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
            assert self._pushed_to is not None
            short = [mark for mark in self._pushed_to if mark != self._total_blocks]
            if short:
                self._fail(
                    f"{len(short)} layers are incomplete in the decode buffer "
                    f"(block {min(short)} of {self._total_blocks})"
                )
        self._done_sent = True
        self._services.send(
            PrefillDone(rid=self.spec.rid, attempt=self.spec.attempt, error=self._error)
        )
        if not self._error and self._lease is not None:
            self._lease.release()
            self._lease = None

    def close(self, reason: str) -> None:
        """End the session; ``closed`` is set when nothing of it is under way any more."""
        if self._closing:
            return
        self._closing = True
        self._spawn(self._close(reason), f"close {self.owner}")

    async def _close(self, reason: str) -> None:
        for load in list(self._loads):
            load.fail(reason)
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        # Transfers cannot be called back. Wait until each is known to be over: only then may the
        # DE's slots be given to someone else, and Closed is what says so.
        while self._transfers:
            await asyncio.wait([transfer.settled for transfer in self._transfers])
        self.closed.set()
        self._services.send(Closed(rid=self.spec.rid, attempt=self.spec.attempt))

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> None:
        self._services.spawn(coroutine, name, self._tasks)


def _chunks(first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(first, last, size):
        yield start, min(start + size, last)
