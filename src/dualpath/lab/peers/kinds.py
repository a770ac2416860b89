"""The peers, and the packages that they need beside vLLM. Pure."""

from __future__ import annotations

import enum
from typing import Final


class Peer(enum.Enum):
    """A way to serve that is not ours; the value is its name in results.

    All have prefill and decode engines, and NIXL between them. They differ in what becomes of a
    turn's KV: NIXL drops it, so that the next turn computes it again; NIXL_BIDIRECTIONAL leaves it
    in the decode engine's memory, from where the next turn's prefill engine fetches it;
    MOONCAKE_STORE keeps it on the storage host, from where the prefill engine reads it.
    """

    NIXL = "nixl"
    NIXL_BIDIRECTIONAL = "nixl-bidirectional"
    MOONCAKE_STORE = "mooncake-store"


NIXL_PACKAGE: Final = "nixl==1.5.1"
"""The name under which vLLM imports NIXL; a few files around the build that is installed."""
MOONCAKE_PACKAGE: Final = "mooncake-transfer-engine-non-cuda==0.3.13.post1"

PACKAGES: Final = {
    Peer.NIXL: (NIXL_PACKAGE,),
    Peer.NIXL_BIDIRECTIONAL: (NIXL_PACKAGE,),
    Peer.MOONCAKE_STORE: (NIXL_PACKAGE, MOONCAKE_PACKAGE),
}
