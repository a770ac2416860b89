"""Which ``(cached, bsz)`` steps are measured for the attention-time model, and the fit. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from dualpath.scheduler.attention_time import Measurement

CACHED_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
BSZ_SHARES: Final = (1.0, 0.5, 0.25, 0.125)
_LEAST_BSZ: Final = 8


def grid(cached_blocks: int, block_tokens: int, most_bsz: int) -> list[tuple[int, int]]:
    """``(cached, bsz)`` of the steps: cached in whole blocks up to ``cached_blocks``, bsz up to
    ``most_bsz`` tokens; small ones first."""
    cached = sorted({round(share * cached_blocks) * block_tokens for share in CACHED_SHARES})
    bsz = sorted({max(_LEAST_BSZ, int(share * most_bsz)) for share in BSZ_SHARES})
    return [(c, b) for c in cached for b in bsz]


def pass_s(
    cells: Iterable[tuple[int, int]], token_bytes: int, read_bytes_s: float, miss_tokens_s: float
) -> float:
    """Roughly how long measuring all ``cells`` once takes."""
    return sum(cached * token_bytes / read_bytes_s + bsz / miss_tokens_s for cached, bsz in cells)


def measurements(samples: Iterable[tuple[int, int, float]]) -> list[Measurement]:
    """The lower quartile of each ``(cached, bsz)``: whatever disturbs a step makes it longer, never
    shorter, so the quicker ones tell what the step itself takes."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for cached, bsz, seconds in samples:
        if seconds > 0:
            cells[cached, bsz].append(seconds)
    return [
        Measurement(cached, bsz, sorted(times)[len(times) // 4])
        for (cached, bsz), times in sorted(cells.items())
    ]
