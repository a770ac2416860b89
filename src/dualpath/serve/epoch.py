"""The weight epoch: KV computed with older weights must never be hit.

It is part of every namespace, so one step makes all stored KV unreachable at once, whether or
not the files are still there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dualpath.config import StorageConfig
from dualpath.storage import Epochs, EpochState, StoreError, open_epochs

logger = logging.getLogger(__name__)


class WeightEpoch:
    """The cluster's epoch as the front knows it. Belongs to the event loop.

    Args:
        storage: where the store is.
        advanced: called after each step, when it is durable and before anyone is told.
    """

    def __init__(self, storage: StorageConfig, advanced: Callable[[], None]) -> None:
        self._storage = storage
        self._epochs: Epochs | None = None
        self._advanced = advanced
        self._state = EpochState()
        self._lock = asyncio.Lock()
        self._running = 0
        self._failed = False

    @property
    def number(self) -> int:
        """The present epoch."""
        return self._state.weight_epoch

    @property
    def in_place(self) -> bool:
        """Whether engines run weights that are newer than those on disk."""
        return self._state.in_place

    @property
    def settled(self) -> bool:
        """False while a step is wanted that is not durable: nothing may be hit or written."""
        return self._running == 0 and not self._failed

    async def load(self) -> None:
        """Read it from the store.

        Raises:
            StoreError: it cannot be read.
        """
        self._epochs = open_epochs(self._storage)
        self._state = await asyncio.to_thread(self._epochs.read)

    async def advance(self, *, in_place: bool, reason: str) -> int:
        """Step once; the returned epoch is durable.

        While this runs, and from then on when it raises, ``settled`` is False: the weights may
        have changed already, so the old epoch must not be used any more. A later success
        settles it.

        Raises:
            StoreError, TimeoutError: the step could not be made durable.
        """
        if self._epochs is None:
            raise StoreError("the weight epoch was not read yet")
        self._running += 1
        try:
            async with self._lock:
                self._failed = True
                self._state = await asyncio.to_thread(self._epochs.advance, in_place=in_place)
                self._failed = False
                self._advanced()
        finally:
            self._running -= 1
        logger.warning("weight epoch is %d now: %s", self._state.weight_epoch, reason)
        return self._state.weight_epoch
