"""What every table of the cluster file is."""

from __future__ import annotations

import msgspec


class Section(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Base of every table: immutable, no unknown fields."""
