"""The header binds a payload to its name, and no byte of it can change unnoticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.storage.header import HEADER_BYTES, BlockHeader, HeaderError, checksum, decode

pytestmark = pytest.mark.unit

digests = st.binary(min_size=32, max_size=32)
headers = st.builds(
    lambda root, key, parent, payload, padding, digest, text: BlockHeader(
        root, key, parent, payload, payload + padding, digest, text
    ),
    digests,
    digests,
    digests,
    st.integers(1, 2**40),
    st.integers(0, 4095),
    st.binary(min_size=16, max_size=16),
    st.text(max_size=60),
)


@given(headers)
def test_decode_gives_back_what_was_encoded(header: BlockHeader) -> None:
    encoded = header.encode()
    assert len(encoded) == HEADER_BYTES
    assert decode(encoded) == header


@given(headers, st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(header: BlockHeader, offset: int, change: int) -> None:
    damaged = bytearray(header.encode())
    damaged[offset] ^= change
    with pytest.raises(HeaderError):
        decode(bytes(damaged))


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_another_size_is_refused(size: int) -> None:
    with pytest.raises(HeaderError, match="bytes"):
        decode(bytes(size))


def test_zeros_are_no_header() -> None:
    with pytest.raises(HeaderError):
        decode(bytes(HEADER_BYTES))


@pytest.mark.parametrize(("offset", "reason"), [(0, "not a block file"), (8, "version")])
def test_a_well_formed_file_of_another_kind_says_so(offset: int, reason: str) -> None:
    header = BlockHeader(bytes(32), bytes(32), bytes(32), 1, 1, bytes(16))
    body = bytearray(header.encode()[:-16])
    body[offset] ^= 0xFF
    with pytest.raises(HeaderError, match=reason):
        decode(bytes(body) + checksum(bytes(body)))


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"},
        {"checksum": b""},
        {"payload_bytes": 0},
        {"payload_bytes": 9},
        {"fingerprint": "x" * 257},
    ],
)
def test_nonsense_cannot_be_encoded(change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "root": bytes(32),
        "key": bytes(32),
        "parent": bytes(32),
        "payload_bytes": 8,
        "stored_bytes": 8,
        "checksum": bytes(16),
        "fingerprint": "",
    }
    with pytest.raises(ValueError):
        BlockHeader(**{**good, **change})  # type: ignore[arg-type]
