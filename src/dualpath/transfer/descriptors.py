"""Lists of memory ranges to copy, as arrays: merged where contiguous, cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Ints = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Range ``i`` is ``sizes[i]`` bytes, at ``local[i]`` on this side and ``remote[i]`` on the
    peer's. All three arrays are uint64 of equal length."""

    local: U64
    remote: U64
    sizes: U64

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes in all ranges together."""
        return int(self.sizes.sum())

    def rows(self, *, remote: bool, device: int = 0) -> U64:
        """One side as ``[n, 3]``: address, length, device."""
        table = np.empty((len(self), 3), dtype=np.uint64)
        table[:, 0] = self.remote if remote else self.local
        table[:, 1] = self.sizes
        table[:, 2] = device
        return table

    @staticmethod
    def joined(parts: Sequence[Descriptors]) -> Descriptors:
        """All ranges of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        return Descriptors(
            np.concatenate([part.local for part in parts]),
            np.concatenate([part.remote for part in parts]),
            np.concatenate([part.sizes for part in parts]),
        )

    def merged(self) -> Descriptors:
        """The same bytes in as few ranges as possible, ordered by remote address.

        Two ranges merge when one follows the other on both sides. The order of ranges within a
        submission has no meaning, so sorting is free to find more neighbours.
        """
        if len(self) < 2:
            return self
        local, remote, sizes = self.local, self.remote, self.sizes
        if (remote[1:] < remote[:-1]).any():
            order = np.argsort(remote, kind="stable")
            local, remote, sizes = local[order], remote[order], sizes[order]
        follows = (local[:-1] + sizes[:-1] == local[1:]) & (remote[:-1] + sizes[:-1] == remote[1:])
        if not follows.any():
            return Descriptors(local, remote, sizes)
        first = np.flatnonzero(np.concatenate(([True], ~follows)))
        return Descriptors(local[first], remote[first], np.add.reduceat(sizes, first))

    def pieces(self, piece_bytes: int, max_ranges: int) -> Iterator[Descriptors]:
        """Cut into submissions of at most ``piece_bytes`` and ``max_ranges`` each, splitting
        ranges where needed."""
        ends = np.cumsum(self.sizes)
        total = int(ends[-1]) if len(ends) else 0
        if 0 < total <= piece_bytes and len(self) <= max_ranges:
            yield self  # the usual case, at a fraction of the cost
            return
        starts = ends - self.sizes
        edges = np.arange(0, total, piece_bytes, dtype=np.uint64)
        cuts = np.union1d(starts, edges)
        source = np.searchsorted(starts, cuts, side="right") - 1
        inside = cuts - starts[source]
        local, remote = self.local[source] + inside, self.remote[source] + inside
        sizes = np.diff(np.append(cuts, np.uint64(total)))
        bounds = np.append(np.searchsorted(cuts, edges), len(cuts)).tolist()
        for first, last in pairwise(bounds):
            for low in range(first, last, max_ranges):
                high = min(low + max_ranges, last)
                yield Descriptors(local[low:high], remote[low:high], sizes[low:high])


def descriptors(local: Ints, remote: Ints, sizes: Ints | int) -> Descriptors:
    """Check and pack ranges.

    Args:
        local, remote: addresses, equally many.
        sizes: bytes of each range, or one number for all.

    Raises:
        ValueError: lengths differ, a size is not positive, or there is nothing to move.
    """
    ours, theirs = np.asarray(local), np.asarray(remote)
    lengths = np.full(len(ours), sizes) if isinstance(sizes, int) else np.asarray(sizes)
    if not len(ours) == len(theirs) == len(lengths):
        raise ValueError(
            f"{len(ours)} local, {len(theirs)} remote addresses and {len(lengths)} sizes"
        )
    if not len(ours):
        raise ValueError("there is nothing to move")
    if (lengths <= 0).any() or (ours <= 0).any() or (theirs <= 0).any():
        raise ValueError("addresses and sizes must be positive")
    return Descriptors(ours.astype(np.uint64), theirs.astype(np.uint64), lengths.astype(np.uint64))
