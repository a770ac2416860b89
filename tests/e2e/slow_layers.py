"""A worker whose layers arrive and leave late, and whose regions hold poison between two layers.

``--worker-cls slow_layers.SlowWorker``. On a PE whose layers take turns, every copy into or out of
the cache waits for a random time first, and a region is filled with large numbers when it is free,
before anything is restored into it: whatever is then read without having been put back shows at
once. (Not with NaN: vLLM's CPU kernel multiplies what a block's unused tokens hold by zero.)
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group

from dualpath.config import Role
from dualpath.engine.connector import DualPathConnector
from dualpath.engine.place import place_of
from dualpath.engine.worker import DualPathWorker
from dualpath.transfer.copying import Copy, CopyEngine, Fence, Run
from dualpath.transfer.regions import Regions
from dualpath.transfer.services import Services

POISON_BYTE = 0x4B  # as float32: 1.3e7
MOSTLY_S = 0.004
RARELY_S = 0.05
RARE = 0.05


class SlowCopies(CopyEngine):
    """Another copy engine, late."""

    def __init__(self, engine: CopyEngine) -> None:
        self.name = engine.name
        self._engine = engine
        self._random = random.Random(20)

    def fence(self, stream: int) -> Fence | None:
        return self._engine.fence(stream)

    def submit(self, runs: Sequence[Run], after: Sequence[Fence] = ()) -> Copy:
        longest = RARELY_S if self._random.random() < RARE else MOSTLY_S
        time.sleep(self._random.uniform(0, longest))
        return self._engine.submit(runs, after)

    def close(self) -> None:
        self._engine.close()


def poison(regions: Regions, services: Services) -> None:
    """Fill a region before the first restore of each layer of each step."""
    cache = services.cache
    done: set[tuple[int, int]] = set()
    until_free = regions.until_free

    async def and_poison(step: int, layer: int) -> None:
        await until_free(step, layer)
        if (step, layer) not in done:
            done.add((step, layer))
            size = cache.num_blocks * cache.block_stride_bytes
            ctypes.memset(cache.layer_addresses[layer], POISON_BYTE, size)
            services.counters["poisoned_layers"] += 1

    regions.until_free = and_poison  # type: ignore[method-assign]


class SlowWorker(DualPathWorker):
    """See the module."""

    pe_share = 1

    def determine_available_memory(self) -> int:
        if place_of(self.vllm_config).role is Role.PREFILL:
            self.cache_config.kv_cache_memory_bytes //= self.pe_share
        return super().determine_available_memory()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group()
        assert isinstance(connector, DualPathConnector)
        assert connector._manager is not None
        services = connector._manager._services
        if services.regions is not None:
            services.copy_engine = SlowCopies(services.copy_engine)
            poison(services.regions, services)


class SlowSmallWorker(SlowWorker):
    """The same, and PEs get a quarter of ``engine.kv_cache``: what a DE has room for to decode
    must not fit a PE, or nothing is ever preempted there."""

    pe_share = 4
