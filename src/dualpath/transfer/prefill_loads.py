"""P2 and D2 of one request on a PE: KV into the device cache, layer by layer, ahead of the model.

A block comes from this side's buffer (hit blocks that the PE read, and blocks of earlier chunks of
the prompt) or out of the DE's. Where layers take turns in the PE's memory, a layer is fetched only
when its region is free, and again for every further chunk of the prompt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from dualpath.transfer.agent import Op, Transfer
from dualpath.transfer.block_map import BlockMap
from dualpath.transfer.descriptors import Ints
from dualpath.transfer.errors import PoolTimeout, PoolTooSmall, TransferError
from dualpath.transfer.loads import DeviceUse, LayerLoad, LoadBlock
from dualpath.transfer.regions import StaleStep
from dualpath.transfer.services import Services, SessionError
from dualpath.transfer.slots import Lease

logger = logging.getLogger(__name__)


class Holder(Protocol):
    """The session, as a load sees it. Traffic thread only."""

    owner: str
    tasks: set[asyncio.Task[None]]

    def host_address(self, index: int) -> int | None:
        """Where block ``index`` lies in this side's buffer; None when it is in the DE's.

        Raises:
            SessionError: it is nowhere.
        """
        ...

    def remote_address(self, index: int) -> int:
        """Where block ``index`` lies in the DE's buffer."""
        ...

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
        ...


class PrefillLoads:
    """The loads of one session. Traffic thread only."""

    def __init__(self, services: Services, session: Holder) -> None:
        self._services = services
        self._session = session
        self._regions = services.regions
        self._running: set[LayerLoad] = set()

    def start(self, load: LayerLoad, use: DeviceUse) -> None:
        """Fill the cache with the load's blocks; ``use`` is left when it is over."""
        self._running.add(load)
        step = 0 if self._regions is None else self._regions.step
        session = self._session
        task = self._services.spawn(self._run(load, step), f"load {session.owner}", session.tasks)

        def over(done: asyncio.Task[None]) -> None:
            self._running.discard(load)
            use.leave()
            load.fail("the session was closed" if done.cancelled() else "the load ended early")

        task.add_done_callback(over)

    def fail_all(self, reason: str) -> None:
        """Give every load up."""
        for load in list(self._running):
            load.fail(reason)

    @property
    def _window(self) -> int:
        """Layers fetched at a time: the one the model waits for, and those ahead of it."""
        if self._regions is not None:
            return self._regions.count
        return self._services.engine.window(self._services.layout.num_layers)

    async def _run(self, load: LayerLoad, step: int) -> None:
        services = self._services
        layers = services.layout.num_layers
        running: list[asyncio.Task[None]] = []
        try:
            places = [self._session.host_address(block.index) for block in load.blocks]
            pairs = list(zip(load.blocks, places, strict=True))
            here = [(block, place) for block, place in pairs if place is not None]
            local = BlockMap(
                services.cache,
                [block.engine_blocks for block, _ in here],
                [place for _, place in here],
            )
            remote = [block for block, place in pairs if place is None]
            for layer in range(layers):
                while len(running) < self._window and layer + len(running) < layers:
                    ahead = layer + len(running)
                    running.append(
                        asyncio.create_task(self._layer(load, step, ahead, local, remote))
                    )
                await running.pop(0)
                load.advance(layer + 1)
        except StaleStep as error:
            load.fail(str(error))
        except (TransferError, PoolTimeout, PoolTooSmall, SessionError) as error:
            services.counters["loads_failed"] += 1
            logger.warning("load of %s failed: %s", self._session.owner, error)
            load.fail(str(error))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _layer(
        self,
        load: LayerLoad,
        step: int,
        layer: int,
        local: BlockMap,
        remote: Sequence[LoadBlock],
    ) -> None:
        services = self._services
        if self._regions is not None:
            # Before landing memory is taken: whoever holds it must be able to go on without the
            # model, which may be waiting for somebody who needs it.
            await self._regions.until_free(step, layer)
        started_s = time.monotonic()
        offset = services.layout.layer_offset_bytes(layer)
        await self._copy(load, layer, local, offset)
        chunk = max(1, services.staging.pool.slots // self._window)
        for start in range(0, len(remote), chunk):
            await self._pull(load, layer, offset, remote[start : start + chunk])
        services.draw(
            "load", f"layer {layer}", started_s,
            session=self._session.owner, pe_blocks=len(local), de_blocks=len(remote),
        )  # fmt: skip

    async def _copy(self, load: LayerLoad, layer: int, places: BlockMap, offset: int) -> None:
        """P2, or the second half of D2: out of host memory into the cache."""
        services = self._services
        after = () if self._regions is None else self._regions.fences(layer)
        await services.copy_for_load(load, places.into_cache(layer, offset), after)
        if load.again:
            services.counters["moved_twice_bytes"] += places.nbytes

    async def _pull(
        self, load: LayerLoad, layer: int, offset: int, blocks: Sequence[LoadBlock]
    ) -> None:
        """D2: read one layer of some blocks out of the DE's buffer, by way of landing memory.

        Not straight into the cache: a read that outlives its deadline may still land, and landing
        slots stay owned until it has, which vLLM's cache blocks could not.
        """
        services = self._services
        session = self._session
        lease = await services.staging.pool.allocate(
            session.owner, len(blocks), services.timeouts.transfer
        )
        try:
            landing = [services.staging.address(slot) for slot in lease.slots]
            size = services.layout.layer_block_bytes
            transfer = session.submit(
                Op.READ,
                landing,
                [session.remote_address(block.index) + offset for block in blocks],
                [size] * len(blocks),
                lease,
                lease.slots,
            )
            await transfer.wait(services.timeouts.transfer)
            services.counters["d2_bytes"] += size * len(blocks)
            places = BlockMap(services.cache, [block.engine_blocks for block in blocks], landing)
            await self._copy(load, layer, places, 0)
        finally:
            lease.release()
