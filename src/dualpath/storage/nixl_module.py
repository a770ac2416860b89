"""The one place that knows under which name NIXL is installed."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Final

_CANDIDATES: Final = ("nixl_cu12", "nixl_cu13", "nixl")


@dataclass(frozen=True, slots=True)
class Nixl:
    """An importable NIXL.

    Attributes:
        name: module name.
        api: its ``_api`` module.
        errors: every exception class its calls raise.
    """

    name: str
    api: Any
    errors: tuple[type[Exception], ...]


def find_nixl() -> Nixl | None:
    """NIXL, or None when none of its packages can be imported (a base install has none)."""
    for name in _CANDIDATES:
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError:
            continue
        bindings = api.nixlBind
        own = [
            value
            for value in vars(bindings).values()
            if isinstance(value, type) and issubclass(value, Exception)
        ]
        # The wrapper around the bindings raises these two when a plugin is missing.
        return Nixl(name, api, (*own, KeyError, RuntimeError))
    return None
