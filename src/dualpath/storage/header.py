"""The 4096 bytes in front of every stored block.

They bind the payload to its name: a file that was renamed, truncated, mixed with another, or had
any byte flipped fails verification. The checksums guard against bit rot and torn writes, not
against somebody who can write to the store on purpose.

Layout (little endian)::

    0     magic             8 bytes
    8     format version    u32
    12    header length     u32
    16    root, key, parent 32 bytes each
    112   payload length    u64, bytes of KV without padding
    120   stored length     u64, bytes of payload in the file, padded
    128   payload checksum  xxh3_128 of all stored bytes, padding included
    144   fingerprint       u16 length, then that many bytes of UTF-8 (at most 256)
    4080  header checksum   xxh3_128 of bytes 0 .. 4080
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import xxhash

from dualpath.blocks import ALIGNMENT_BYTES, KEY_BYTES, BlockLayout

HEADER_BYTES: Final = ALIGNMENT_BYTES
FORMAT_VERSION: Final = 1
MAX_FINGERPRINT_BYTES: Final = 256
_MAGIC: Final = b"DUALPKV\x01"
_FIELDS: Final = struct.Struct("<8sII32s32s32sQQ16sH")
_CHECKSUM_OFFSET: Final = HEADER_BYTES - 16


class HeaderError(ValueError):
    """The bytes are not a valid header; the message says which check failed."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Everything a header says.

    Attributes:
        root, key, parent: 32 bytes each, see ``BlockId``.
        payload_bytes: bytes of KV.
        stored_bytes: ``payload_bytes`` padded to the alignment; what follows the header.
        checksum: xxh3_128 of the stored bytes.
        fingerprint: geometry in words, for people who look at a file.

    Raises:
        ValueError: a field has a wrong size.
    """

    root: bytes
    key: bytes
    parent: bytes
    payload_bytes: int
    stored_bytes: int
    checksum: bytes
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("root", "key", "parent"):
            if len(getattr(self, name)) != KEY_BYTES:
                raise ValueError(f"{name} must be {KEY_BYTES} bytes")
        if len(self.checksum) != 16:
            raise ValueError("checksum must be 16 bytes")
        if not 0 < self.payload_bytes <= self.stored_bytes:
            raise ValueError("payload_bytes must be within 1..stored_bytes")
        if len(self.fingerprint.encode()) > MAX_FINGERPRINT_BYTES:
            raise ValueError(f"fingerprint is longer than {MAX_FINGERPRINT_BYTES} bytes")

    def encode(self) -> bytes:
        """The header's 4096 bytes."""
        text = self.fingerprint.encode()
        fields = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, HEADER_BYTES, self.root, self.key, self.parent,
            self.payload_bytes, self.stored_bytes, self.checksum, len(text),
        )  # fmt: skip
        body = (fields + text).ljust(_CHECKSUM_OFFSET, b"\0")
        return body + checksum(body)


def decode(data: bytes | memoryview) -> BlockHeader:
    """Check and read 4096 bytes.

    Raises:
        HeaderError: wrong size, magic, version or checksum.
    """
    if len(data) != HEADER_BYTES:
        raise HeaderError(f"header is {len(data)} bytes, not {HEADER_BYTES}")
    body = bytes(data[:_CHECKSUM_OFFSET])
    if checksum(body) != bytes(data[_CHECKSUM_OFFSET:]):
        raise HeaderError("header checksum is wrong")
    (magic, version, length, root, key, parent, payload, stored, digest, text_bytes) = (
        _FIELDS.unpack_from(body)
    )
    if magic != _MAGIC:
        raise HeaderError("not a block file")
    if version != FORMAT_VERSION or length != HEADER_BYTES:
        raise HeaderError(f"format version {version} is not {FORMAT_VERSION}")
    text = body[_FIELDS.size : _FIELDS.size + text_bytes]
    try:
        return BlockHeader(root, key, parent, payload, stored, digest, text.decode())
    except ValueError as error:
        raise HeaderError(str(error)) from error


def checksum(data: bytes | memoryview) -> bytes:
    """xxh3_128 of ``data``: 16 bytes."""
    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def fingerprint(layout: BlockLayout) -> str:
    """Geometry in words, kept in every header."""
    return (
        f"layers={layout.num_layers} tokens={layout.block_tokens} "
        f"token_layer_bytes={layout.token_layer_bytes}"
    )
