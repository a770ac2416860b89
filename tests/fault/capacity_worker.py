"""A process that writes chains into a store with a capacity, for ever, and is killed for it.

Usage: capacity_worker.py STORE CAPACITY_BYTES SALT [fsync]
Prints the outcomes of every write, one line each.
"""

import hashlib
import itertools
import sys
import time
from collections import Counter

from dualpath.blocks import BlockLayout
from dualpath.storage import BlockId, BlockStore
from dualpath.storage.header import HEADER_BYTES
from dualpath.storage.memory import aligned_buffers

LAYOUT = BlockLayout(num_layers=2, block_tokens=16, engine_block_tokens=16, token_layer_bytes=1000)
"""32,000 bytes of KV in slots of 32,768."""
FILE_BYTES = HEADER_BYTES + LAYOUT.slot_bytes
ROOT = hashlib.sha256(b"capacity").digest()
BATCH = 4


def open_store(path: str, capacity_bytes: int) -> BlockStore:
    """The store as these tests use it."""
    return BlockStore.open(
        path, LAYOUT, io="threads", direct="off", fsync=False, batch_blocks=BATCH,
        capacity_bytes=capacity_bytes,
    )  # fmt: skip


def chain(count: int, salt: str) -> list[BlockId]:
    """A chain below the root."""
    blocks: list[BlockId] = []
    parent = ROOT
    for index in range(count):
        key = hashlib.sha256(f"{salt}/{index}".encode()).digest()
        blocks.append(BlockId(key, parent))
        parent = key
    return blocks


def content(block: BlockId) -> bytes:
    """Bytes that follow from the key."""
    return hashlib.shake_128(block.key).digest(4096) * (LAYOUT.slot_bytes // 4096)


def main(path: str, capacity: str, salt: str) -> None:
    """Write chains of three parts until somebody ends it."""
    with open_store(path, int(capacity)) as store:
        slots = aligned_buffers(BATCH, LAYOUT.slot_bytes)
        print("ready", flush=True)
        for turn in itertools.count():
            blocks = chain(BATCH * 3, f"{salt}/{turn}")
            outcomes: Counter[str] = Counter()
            for start in range(0, len(blocks), BATCH):
                part = blocks[start : start + BATCH]
                for block, slot in zip(part, slots, strict=True):
                    slot[:] = content(block)
                # Before it is there, so that nobody evicts it between this part and the next.
                store.pin(ROOT, part[-1].key, time.monotonic() + 30)
                statuses = store.write(ROOT, part, slots, time.monotonic() + 30)
                outcomes.update(status.value for status in statuses)
                if start:
                    store.unpin(ROOT, blocks[start - 1].key)
            store.unpin(ROOT, blocks[-1].key)
            evicted = sum(len(keys) for keys in store.take_evicted().values())
            print(turn, dict(outcomes), f"evicted {evicted}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
