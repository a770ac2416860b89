"""What a DualPath front says about itself: bytes read per node, hit bytes per path, mode.

The front's ``GET /debug/state`` holds, besides much else, ``mode`` and two sets of totals that
only grow: ``snic`` (storage bytes read, by node) and ``path`` (hit bytes by read path: ``pe``,
``de``, ``split``). A run's share is the difference between two looks.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import msgspec

from dualpath.workload.client import Endpoint
from dualpath.workload.stream import RequestFailed

STATE_PATH: Final = "/debug/state"
_LOOK_S: Final = 10.0
_SETTLE_STEP_S: Final = 0.3
_SETTLE_STEPS: Final = 20

log = logging.getLogger(__name__)


class FrontTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since the front started."""

    mode: str
    snic: dict[str, int]
    path: dict[str, int]

    def since(self, earlier: FrontTotals) -> FrontTotals | None:
        """What was added after ``earlier``; None when a total fell (something was restarted)."""
        added = FrontTotals(
            mode=self.mode,
            snic={name: value - earlier.snic.get(name, 0) for name, value in self.snic.items()},
            path={name: value - earlier.path.get(name, 0) for name, value in self.path.items()},
        )
        values = (*added.snic.values(), *added.path.values())
        return None if any(value < 0 for value in values) else added


_TOTALS: Final = msgspec.json.Decoder(FrontTotals)


async def look(endpoint: Endpoint) -> FrontTotals | None:
    """Totals now; None when the endpoint is no DualPath front or does not let us see (logged)."""
    try:
        status, body = await endpoint.get(STATE_PATH, _LOOK_S)
    except RequestFailed as error:
        log.warning("no front figures: %s", error)
        return None
    if status == 404:
        log.info("%s has no %s: not a DualPath front", endpoint.url, STATE_PATH)
        return None
    if status != 200:
        log.warning("no front figures: %s%s answers HTTP %d", endpoint.url, STATE_PATH, status)
        return None
    try:
        return _TOTALS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("no front figures: %s%s: %s", endpoint.url, STATE_PATH, error)
        return None


async def look_settled(endpoint: Endpoint) -> FrontTotals | None:
    """Totals once they stand still: engines report now and then, so the last bytes come late."""
    totals = await look(endpoint)
    for _ in range(_SETTLE_STEPS):
        if totals is None:
            return None
        await asyncio.sleep(_SETTLE_STEP_S)
        earlier, totals = totals, await look(endpoint)
        if totals == earlier:
            return totals
    log.warning("the front's totals did not stand still; the last ones are used")
    return totals
