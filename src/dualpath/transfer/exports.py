"""The KV a PE has computed in host memory: on its way to the DE, and back for the next chunk.

Only with layers that take turns in the PE's memory (``regions``). What a step adds to a layer is
copied into PE-buffer slots at once, because the region is soon another layer's. From there it goes
to the DE (P4, D4), and when the prompt takes more steps it is put back before each layer of the
next one. The slots are asked for together with those for the hit, when the session opens: asked
for later, two half-computed prompts could wait for each other's for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dualpath.transfer.block_map import BlockMap
from dualpath.transfer.copying import Fence
from dualpath.transfer.regions import Regions
from dualpath.transfer.services import Services
from dualpath.transfer.slots import IoToken, Lease


@dataclass(frozen=True, slots=True)
class PushBlock:
    """A block computed on the PE: its index in the prompt and where it lies in the cache.

    ``complete``: no later step adds to it, so it belongs in the DE's buffer now.
    """

    index: int
    engine_blocks: tuple[int, ...]
    complete: bool = True


class NoRoom(RuntimeError):
    """Blocks must be computed again for which no room was asked; the front tries again."""


class Exports:
    """Where the computed blocks of one session lie in the PE buffer. Traffic thread only.

    Args:
        owner: of slots, for people to read.
        regions: the engine's.
    """

    def __init__(self, services: Services, owner: str, regions: Regions) -> None:
        self._services = services
        self._owner = owner
        self._regions = regions
        self._places: dict[int, tuple[Lease, int]] = {}
        self._extra: list[Lease] = []

    def reserve(self, lease: Lease, slots: Sequence[int], first: int) -> None:
        """Use ``slots`` of the session's lease for blocks from index ``first`` on."""
        for offset, slot in enumerate(slots):
            self._places[first + offset] = (lease, slot)

    def require(self, indices: Iterable[int]) -> None:
        """Have room for these blocks too: a hit that was not one, or could not be loaded.

        Their slots are new ones: those the hit was read into may be on their way to the DE.

        Raises:
            NoRoom: the buffer has none free.
        """
        missing = [index for index in indices if index not in self._places]
        if not missing:
            return
        lease = self._services.buffer.pool.try_allocate(self._owner, len(missing))
        if lease is None:
            raise NoRoom(f"{len(missing)} hit blocks must be computed again and the buffer is full")
        self._extra.append(lease)
        for index, slot in zip(missing, lease.slots, strict=True):
            self._places[index] = (lease, slot)

    def address(self, index: int) -> int:
        """Where a block's Full Block starts.

        Raises:
            KeyError: no room was asked for it.
        """
        return self._services.buffer.address(self._places[index][1])

    def begin_io(self, indices: Iterable[int]) -> Callable[[], None]:
        """Keep the slots of these blocks until the returned function is called."""
        by_lease: dict[int, tuple[Lease, list[int]]] = {}
        for index in indices:
            lease, slot = self._places[index]
            by_lease.setdefault(id(lease), (lease, []))[1].append(slot)
        tokens: list[IoToken] = [lease.begin_io(slots) for lease, slots in by_lease.values()]

        def end() -> None:
            for token in tokens:
                token.end()

        return end

    def copy_out(
        self, layer: int, blocks: Sequence[PushBlock], after: Sequence[Fence] = ()
    ) -> asyncio.Future[int]:
        """Copy a layer's blocks out of its region, which counts as read until that is over. They
        are computed when the device has reached ``after``.

        The future fails with ``CopyFailed``.
        """
        services = self._services
        offset = services.layout.layer_offset_bytes(layer)
        places = BlockMap(
            services.cache,
            [block.engine_blocks for block in blocks],
            [self.address(block.index) for block in blocks],
        )
        runs = places.out_of_cache(layer, offset)
        end_io = self.begin_io(block.index for block in blocks)
        started_s = time.monotonic()
        copied = services.copy(runs, after)

        def over(done: asyncio.Future[int]) -> None:
            end_io()
            self._regions.export_over(layer)
            if not done.cancelled() and done.exception() is None:
                services.counters["device_to_host_bytes"] += done.result()
                services.draw("export", f"layer {layer}", started_s, session=self._owner)

        copied.add_done_callback(over)
        return copied

    def release(self) -> None:
        """Give back what ``require`` took; the session's own lease is the session's."""
        for lease in self._extra:
            lease.release()
        self._extra.clear()
        self._places.clear()
