"""The cluster's weight epoch in a bucket; see ``storage.epoch``."""

from __future__ import annotations

import errno
import random
import time
from typing import Final

import msgspec

from dualpath.storage.epoch import EpochState, decode_epoch
from dualpath.storage.objects.bucket import Bucket, ObjectError
from dualpath.storage.objects.names import EPOCH_OBJECT
from dualpath.storage.types import StoreError

_PAUSE_S: Final = 0.02


class EpochObject:
    """``<prefix>/epoch.json``. See ``Epochs``.

    Each step replaces the object on the condition that nobody has in between, so two callers
    never make the same step.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._where = f"{bucket.where}/{EPOCH_OBJECT}"

    def read(self) -> EpochState:
        """See ``Epochs``."""
        return self._load()[0]

    def advance(self, *, in_place: bool, timeout_s: float = 10.0) -> EpochState:
        """See ``Epochs``. After a lost answer it may advance twice, which is harmless."""
        deadline = time.monotonic() + timeout_s
        while True:
            before, etag = self._load()
            after = EpochState(weight_epoch=before.weight_epoch + 1, in_place=in_place)
            try:
                self._bucket.put(
                    EPOCH_OBJECT, msgspec.json.encode(after), absent=not etag, etag=etag
                )
            except ObjectError as error:
                if error.errno not in (errno.EEXIST, errno.ESTALE):
                    raise StoreError(f"{self._where}: {error.strerror}") from error
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{self._where}: others change it all the time") from None
                time.sleep(_PAUSE_S * random.uniform(0.5, 1.0))
            else:
                return after

    def _load(self) -> tuple[EpochState, str]:
        try:
            found = self._bucket.fetch(EPOCH_OBJECT)
        except ObjectError as error:
            raise StoreError(f"{self._where}: {error.strerror}") from error
        if found is None:
            return EpochState(), ""
        raw, etag = found
        return decode_epoch(raw, self._where), etag
