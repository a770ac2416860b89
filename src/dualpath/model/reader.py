"""Typed access to the fields of a ``config.json``, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec


class UnsupportedModel(ValueError):
    """The facts cannot be known; one line naming the architecture and the field."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one model; ``where`` opens every error (an architecture, a file)."""

    values: Mapping[str, Any]
    where: str

    def error(self, field: str, text: str) -> UnsupportedModel:
        """An error about ``field``, to be raised by the caller."""
        return UnsupportedModel(f"{self.where}: {field}: {text}")

    def has(self, field: str) -> bool:
        """Whether ``field`` is there and not null."""
        return self.values.get(field) is not None

    def count(self, field: str, default: int | None = None) -> int:
        """A whole number >= 1; ``default`` when the field is absent or null.

        Raises:
            UnsupportedModel: absent without a default, or not a positive integer.
        """
        value = self.values.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing; it must be a positive integer")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"must be a positive integer, got {value!r}")
        return value

    def whole(self, field: str, default: int = 0) -> int:
        """Like ``count``, but zero is allowed too."""
        value = self.values.get(field)
        return default if value in (None, 0) and value is not False else self.count(field)


def load_config(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    """A decoded ``config.json`` from itself, its path, or the folder it lies in; and its name.

    Raises:
        UnsupportedModel: unreadable, or not a JSON object.
    """
    if isinstance(source, Mapping):
        return source, "config.json"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        decoded = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UnsupportedModel(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedModel(f"{path}: not valid JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object")
    return decoded, str(path)


def architecture_of(values: Mapping[str, Any], where: str) -> str:
    """The Hugging Face class name of a ``config.json`` read from ``where``.

    Raises:
        UnsupportedModel: there is none.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnsupportedModel(f"{where}: architectures: must be a list with a name, got {names!r}")
    return names[0]
