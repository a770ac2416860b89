"""Chain hash that names stored blocks.

A block's key covers everything that decides its bytes: the root (model, weights, layout, tenant)
and every token up to the block's end. Each part is hashed from a typed, length-prefixed encoding
under its own tag, so two different inputs can never concatenate to the same bytes, and nothing
depends on the process, ``PYTHONHASHSEED`` or the platform.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

KEY_BYTES: Final = 32
_ROOT_TAG: Final = b"dualpath.root.v1"
_BLOCK_TAG: Final = b"dualpath.blk.v1"


class KeyRoot(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides KV bytes besides the tokens. Two roots never share a block.

    Attributes:
        model: identity of the architecture and weights on disk (a digest or a name).
        revision: revision of the weights, empty when there is none.
        weight_epoch: number of in-place weight updates; old KV is unreachable after one.
        dtype: element type of the cache, e.g. ``float32``.
        num_layers, block_tokens, token_layer_bytes: geometry, see ``BlockLayout``.
        layout_id: physical order of the bytes inside a Layer Block (backend, ISA, version).
        tp_size, tp_rank: tensor-parallel shard the bytes belong to.
        lora: adapter identity, empty for the base model.
        tenant: salt that keeps tenants from seeing each other's hits.
    """

    model: str
    revision: str = ""
    weight_epoch: int = 0
    dtype: str
    num_layers: int
    block_tokens: int
    token_layer_bytes: int
    layout_id: str
    tp_size: int = 1
    tp_rank: int = 0
    lora: str = ""
    tenant: str = ""

    def digest(self) -> bytes:
        """Hash of every field by name: 32 bytes, the parent of a prompt's first block."""
        fields = msgspec.to_builtins(self)
        encoded = msgspec.msgpack.encode(sorted(fields.items()))
        return _hash(_ROOT_TAG, encoded)


def chain_keys(root: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Keys of every complete block of ``tokens``.

    Args:
        root: ``KeyRoot.digest()``.
        tokens: token ids, each in 0 .. 2**32 - 1.
        block_tokens: tokens in a block.

    Returns:
        ``len(tokens) // block_tokens`` keys of 32 bytes, in order.

    Raises:
        OverflowError: a token id does not fit 32 bits.
    """
    return extend_keys(root, tokens, block_tokens)


def extend_keys(parent: bytes, tokens: Iterable[int], block_tokens: int) -> list[bytes]:
    """Keys of the complete blocks that follow the block named ``parent``."""
    packed = array("I", tokens)
    if packed.itemsize != 4:  # the C type is only promised to be at least 16 bits
        raise OverflowError("this platform has no 32-bit unsigned int array")
    keys: list[bytes] = []
    for start in range(0, len(packed) - block_tokens + 1, block_tokens):
        parent = _hash(_BLOCK_TAG, parent, _little_endian(packed[start : start + block_tokens]))
        keys.append(parent)
    return keys


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array("I", values)
        values.byteswap()
    return values.tobytes()


def _hash(tag: bytes, *parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=tag)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
