"""Sizes, rates and durations as a cluster file writes them: a number with its unit."""

from __future__ import annotations

import math
import re
from typing import Final


class Size(int):
    """A number of bytes, written ``"64MiB"``, ``"80GB"`` or ``"4096B"``."""


class Rate(float):
    """Bytes a second, written ``"400Mbit/s"``, ``"50Gbit/s"``, ``"1.5GB/s"`` or ``"unlimited"``."""

    @property
    def limited(self) -> bool:
        """Whether there is a limit at all."""
        return not math.isinf(self)


class Seconds(float):
    """A duration, written ``"4s"``, ``"300ms"`` or ``"2min"``."""


_NUMBER: Final = r"\s*([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)\s*"
_SIZE_UNITS: Final[dict[str, float]] = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_RATE_UNITS: Final[dict[str, float]] = {
    "bit/s": 1 / 8, "kbit/s": 1e3 / 8, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8, "Tbit/s": 1e12 / 8,
    "B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9,
    "KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30,
}  # fmt: skip
_TIME_UNITS: Final[dict[str, float]] = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def _parse(kind: str, text: object, units: dict[str, float], example: str) -> float:
    if not isinstance(text, str):
        raise ValueError(f"expected a {kind} with a unit such as {example!r}, got {text!r}")
    match = re.fullmatch(_NUMBER + r"([A-Za-z/]+)\s*", text)
    if match is None or match[2] not in units:
        raise ValueError(
            f"expected a {kind} such as {example!r} (units: {', '.join(units)}), got {text!r}"
        )
    return float(match[1]) * units[match[2]]


def parse_size(text: object) -> Size:
    """Bytes from ``"64MiB"``.

    Raises:
        ValueError: not a number with a known unit, or not a whole number of bytes.
    """
    value = _parse("size", text, _SIZE_UNITS, "64MiB")
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return Size(int(value))


def parse_rate(text: object) -> Rate:
    """Bytes a second from ``"400Mbit/s"``; ``"unlimited"`` gives infinity.

    Raises:
        ValueError: not a positive number with a known unit.
    """
    if text == "unlimited":
        return Rate(math.inf)
    value = _parse("rate", text, _RATE_UNITS, "400Mbit/s")
    if value <= 0:
        raise ValueError(f"a rate must be above zero or 'unlimited', got {text!r}")
    return Rate(value)


def parse_seconds(text: object) -> Seconds:
    """Seconds from ``"300ms"``.

    Raises:
        ValueError: not a number with a known unit.
    """
    return Seconds(_parse("duration", text, _TIME_UNITS, "300ms"))


PARSERS: Final = {Size: parse_size, Rate: parse_rate, Seconds: parse_seconds}


def decode_unit(kind: type, value: object) -> object:
    """msgspec's hook for fields of these types."""
    parser = PARSERS.get(kind)
    if parser is None:
        raise NotImplementedError(kind)
    return value if isinstance(value, kind) else parser(value)


def encode_unit(value: object) -> object:
    """Sizes, rates and durations as text with units; floats with every digit they have."""
    if isinstance(value, Size):
        return f"{int(value)}B"
    if isinstance(value, Rate):
        return f"{float(value)!r}B/s" if value.limited else "unlimited"
    if isinstance(value, Seconds):
        return f"{float(value)!r}s"
    raise NotImplementedError(type(value))
