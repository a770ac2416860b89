"""Who is calling."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from dualpath.config import SecurityConfig, is_loopback
from dualpath.serve.errors import ApiError

_SCHEME = "bearer "


def tenant_of(headers: Mapping[str, str], security: SecurityConfig) -> str:
    """The caller's tenant; the empty one when no API keys are configured.

    Raises:
        ApiError: 401, no key or an unknown one.
    """
    if not security.api_keys:
        return ""
    given = _bearer(headers)
    found = ""
    known = False
    # Every key is compared, in constant time each, so that the time taken tells nothing.
    for key, tenant in security.api_keys.items():
        if _equal(given, key):
            found, known = tenant, True
    if not known:
        raise ApiError(
            401,
            "Incorrect or missing API key: send 'Authorization: Bearer KEY'.",
            headers={"www-authenticate": "Bearer"},
        )
    return found


def require_admin(headers: Mapping[str, str], host: str, security: SecurityConfig) -> None:
    """Let the administrator through.

    Args:
        host: address the API listens on; without an admin key only loopback is open.

    Raises:
        ApiError: 401 for a wrong key, 403 where no key is configured and the API is not on
            loopback.
    """
    if security.admin_key:
        if not _equal(_bearer(headers), security.admin_key):
            raise ApiError(401, "This endpoint needs the admin key.")
    elif not is_loopback(host):
        raise ApiError(403, "Set security.admin_key to use this endpoint beyond loopback.")


def _bearer(headers: Mapping[str, str]) -> str:
    value = headers.get("authorization", "")
    return value[len(_SCHEME) :].strip() if value.lower().startswith(_SCHEME) else ""


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
