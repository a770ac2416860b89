"""How ``dualpath profile`` marks its own requests, so that the front can tell them from work."""

from __future__ import annotations

from typing import Any, Final

SALT: Final = "dualpath-profile-"
"""What their ``cache_salt`` begins with; the rest is random, so that they hit no other's blocks."""


def is_measurement(body: dict[str, Any]) -> bool:
    """Whether a request's body is one that ``dualpath profile`` has sent."""
    salt = body.get("cache_salt")
    return isinstance(salt, str) and salt.startswith(SALT)
