"""The kinds of store that one contract holds for, and what tests may do behind their backs."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import msgspec
from s3_server import S3Server, object_name
from storage_kit import LAYOUT, ROOT, empty, path_of, soon

from dualpath.blocks import BlockLayout
from dualpath.config import Size, StorageConfig
from dualpath.storage import (
    BlockId,
    Epochs,
    Limiter,
    ReadStatus,
    Store,
    Upkeep,
    open_epochs,
    open_store,
    open_upkeep,
)
from dualpath.storage.header import HEADER_BYTES

OBJECT_BYTES = HEADER_BYTES + LAYOUT.slot_bytes


class Kind:
    """A kind of store with a place of its own."""

    counts_at_once = False
    """Whether ``stored_bytes`` means one moment, also while writers are at work."""

    def __init__(self, storage: StorageConfig) -> None:
        self.storage = storage

    def open(
        self,
        *,
        blocks: int = 0,
        layout: BlockLayout = LAYOUT,
        read_limiter: Limiter | None = None,
        write_limiter: Limiter | None = None,
    ) -> Store:
        """The store; with room for ``blocks`` blocks and not a byte more that is of any use."""
        capacity = blocks * OBJECT_BYTES + OBJECT_BYTES - 1 if blocks else 0
        storage = msgspec.structs.replace(self.storage, capacity=Size(capacity))
        return open_store(storage, layout, read_limiter=read_limiter, write_limiter=write_limiter)

    def upkeep(self) -> closing[Upkeep]:
        return closing(open_upkeep(self.storage))

    def epochs(self) -> Epochs:
        return open_epochs(self.storage)

    def raw(self, block: BlockId, root: bytes = ROOT) -> bytes:
        """What is stored as ``block``."""
        raise NotImplementedError

    def put_raw(self, block: BlockId, data: bytes, root: bytes = ROOT) -> None:
        """Store any bytes as ``block``."""
        raise NotImplementedError

    def delete_raw(self, block: BlockId, root: bytes = ROOT) -> None:
        raise NotImplementedError

    def put_epoch(self, data: bytes) -> None:
        raise NotImplementedError

    def stored_bytes(self) -> int:
        """All blocks' sizes, as the place itself counts them."""
        raise NotImplementedError

    def leftovers(self) -> list[str]:
        """What is there beside blocks, epoch and account."""
        raise NotImplementedError

    def make_older(self, store: Store, older: Sequence[BlockId], newer: Sequence[BlockId]) -> None:
        """Let ``older`` have been used before ``newer``."""
        raise NotImplementedError


class Directory(Kind):
    """A directory, with one of the I/O methods."""

    def raw(self, block: BlockId, root: bytes = ROOT) -> bytes:
        return self._path(block, root).read_bytes()

    def put_raw(self, block: BlockId, data: bytes, root: bytes = ROOT) -> None:
        path = self._path(block, root)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def delete_raw(self, block: BlockId, root: bytes = ROOT) -> None:
        self._path(block, root).unlink()

    def put_epoch(self, data: bytes) -> None:
        self._store.mkdir(exist_ok=True)
        (self._store / "epoch.json").write_bytes(data)

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._store.glob("blocks/*/*/*"))

    def leftovers(self) -> list[str]:
        return [str(path) for path in self._store.glob("tmp/*")]

    def make_older(self, store: Store, older: Sequence[BlockId], newer: Sequence[BlockId]) -> None:
        for blocks, when_s in ((older, 1000.0), (newer, 2000.0)):
            for block in blocks:
                os.utime(self._path(block, ROOT), (when_s, when_s))

    @property
    def _store(self) -> Path:
        return Path(self.storage.path)

    def _path(self, block: BlockId, root: bytes) -> Path:
        return path_of(self._store, block, root)


class InBucket(Kind):
    """A prefix of its own on a running server."""

    counts_at_once = True

    def __init__(self, server: S3Server, prefix: str, **settings: object) -> None:
        super().__init__(server.storage(prefix, **settings))
        self.server = server
        self.prefix = prefix

    def raw(self, block: BlockId, root: bytes = ROOT) -> bytes:
        return self.server.get(f"{self.prefix}/{object_name(root, block)}")

    def put_raw(self, block: BlockId, data: bytes, root: bytes = ROOT) -> None:
        self.server.put(f"{self.prefix}/{object_name(root, block)}", data)

    def delete_raw(self, block: BlockId, root: bytes = ROOT) -> None:
        self.server.delete(f"{self.prefix}/{object_name(root, block)}")

    def put_epoch(self, data: bytes) -> None:
        self.server.put(f"{self.prefix}/epoch.json", data)

    def stored_bytes(self) -> int:
        return sum(self.server.sizes(f"{self.prefix}/blocks/").values())

    def leftovers(self) -> list[str]:
        beside = ("blocks/", "epoch.json", "capacity")
        names = [name.removeprefix(f"{self.prefix}/") for name in self.server.sizes(self.prefix)]
        return [name for name in names if not name.startswith(beside)]

    def make_older(self, store: Store, older: Sequence[BlockId], newer: Sequence[BlockId]) -> None:
        statuses = store.read(ROOT, newer, empty(len(newer)), soon())
        assert statuses == [ReadStatus.OK] * len(newer)


def build_shim(folder: Path) -> Path | None:
    """The stand-in for 3FS's client library; None where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "libhf3fs_api_shared.so"
    source = Path(__file__).parent / "usrbio_shim" / "shim.c"
    subprocess.run(
        [compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source,
         "-lpthread"],
        check=True,
        timeout=60,
    )  # fmt: skip
    return library
