"""The cluster's weight epoch, kept in the store so that it outlives every process.

Blocks written under an older epoch have another root and are never hit again. The number only
ever grows.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path
from typing import Final

import msgspec

from dualpath.storage.types import StoreError
from dualpath.storage.writing import sync_dir

_LOCK_POLL_S: Final = 0.005


class EpochState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says.

    Attributes:
        weight_epoch: number of weight updates so far.
        in_place: whether the engines' weights are newer than those on disk, so that an engine
            that starts afresh has other weights than the rest.
    """

    weight_epoch: int = 0
    in_place: bool = False


def decode_epoch(raw: bytes, where: object) -> EpochState:
    """What an epoch file says.

    Raises:
        StoreError: it is none; ``where`` names it.
    """
    try:
        state = msgspec.json.decode(raw, type=EpochState)
    except msgspec.MsgspecError as error:
        raise StoreError(f"{where}: not an epoch file: {error}") from error
    if state.weight_epoch < 0:
        raise StoreError(f"{where}: weight_epoch {state.weight_epoch} is below zero")
    return state


class EpochFile:
    """``<store>/epoch.json``. Any thread and process may call.

    Args:
        store: the store's directory; made when missing.
    """

    def __init__(self, store: str | Path) -> None:
        self._store = Path(store).absolute()
        self._path = self._store / "epoch.json"

    def read(self) -> EpochState:
        """The present state; epoch 0 when none was ever written.

        Raises:
            StoreError: the file is unreadable or not an epoch. Never taken for epoch 0: that
                would make old KV reachable again.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return EpochState()
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from error
        return decode_epoch(raw, self._path)

    def advance(self, *, in_place: bool, timeout_s: float = 10.0) -> EpochState:
        """Add one to the epoch; durable when this returns.

        Two callers at once advance it twice.

        Raises:
            TimeoutError: another caller holds the lock for longer than ``timeout_s``.
            StoreError: the file cannot be read or written; the epoch may then have advanced or
                not, and calling again is safe.
        """
        try:
            self._store.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._store / "epoch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from error
        try:
            self._take(lock, timeout_s)
            before = self.read()
            after = EpochState(weight_epoch=before.weight_epoch + 1, in_place=in_place)
            self._replace(msgspec.json.encode(after))
        except TimeoutError:
            raise
        except OSError as error:
            raise StoreError(f"{self._path}: {error.strerror}") from error
        finally:
            os.close(lock)
        return after

    def _take(self, lock: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{self._path} is locked by another process") from None
                time.sleep(_LOCK_POLL_S)
            else:
                return

    def _replace(self, data: bytes) -> None:
        temp = self._path.with_name(f"epoch.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                os.write(fd, data)
                os.fsync(fd)
            finally:
                os.close(fd)
            temp.rename(self._path)
        finally:
            temp.unlink(missing_ok=True)
        sync_dir(self._store)
