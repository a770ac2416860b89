"""How long attention takes for a request in a prefill batch: a model fitted from measurements.

A request is ``(cached, bsz)``: tokens whose KV exists, tokens computed in this step. What attention
does for it grows with bsz (projections), cached (reading KV), bsz * cached (new queries against old
keys) and bsz ** 2 (causal attention within the chunk); what does not grow with the request is paid
once a step. Pure Python: the normal equations have at most five unknowns.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

MAX_MEAN_RELATIVE_ERROR: Final = 0.15
_SINGULAR: Final = 1e-15


class Measurement(msgspec.Struct, frozen=True, gc=False):
    """Attention took ``seconds`` in a step of one request.

    Raises:
        ValueError: ``cached`` is negative, or ``bsz`` or ``seconds`` is not positive.
    """

    cached: int
    bsz: int
    seconds: float

    def __post_init__(self) -> None:
        if self.cached < 0 or self.bsz < 1 or not 0 < self.seconds < float("inf"):
            raise ValueError(f"cached >= 0, bsz >= 1 and seconds > 0 are needed, got {self}")


class Residual(msgspec.Struct, frozen=True, gc=False):
    """A measurement beside what the model says of it."""

    cached: int
    bsz: int
    measured_s: float
    predicted_s: float

    @property
    def relative_error(self) -> float:
        """Distance from the measured time, as a part of it."""
        return abs(self.predicted_s - self.measured_s) / self.measured_s


class FitRefusedError(ValueError):
    """The measurements do not make a usable model.

    Attributes:
        mean_relative_error: of the best fit there is; None when there were too few measurements.
    """

    def __init__(self, message: str, mean_relative_error: float | None = None) -> None:
        super().__init__(message)
        self.mean_relative_error = mean_relative_error


class AttentionTimeModel(msgspec.Struct, frozen=True):
    """Seconds of attention; no coefficient is negative, so more tokens never take less time.

    Attributes:
        fixed_s: once a step.
        token_s: per computed token.
        cached_s: per cached token.
        cross_s: per computed token and cached token.
        square_s: per square of the computed tokens.
        mean_relative_error: over the measurements.
        residuals: every measurement and its prediction.
        model, hardware: what was measured, for people.
    """

    fixed_s: float
    token_s: float
    cached_s: float
    cross_s: float
    square_s: float
    mean_relative_error: float = 0.0
    residuals: tuple[Residual, ...] = ()
    model: str = ""
    hardware: str = ""

    def request_s(self, cached: int, bsz: int) -> float:
        """What a request adds to a step, in seconds; 0 for ``bsz`` 0."""
        if bsz == 0:
            return 0.0
        return (
            self.token_s * bsz
            + self.cached_s * cached
            + self.cross_s * bsz * cached
            + self.square_s * bsz * bsz
        )

    def batch_s(self, pairs: Iterable[tuple[int, int]]) -> float:
        """A step of ``(cached, bsz)`` requests, in seconds; 0 for a step without tokens."""
        times = [self.request_s(cached, bsz) for cached, bsz in pairs if bsz]
        return self.fixed_s + sum(times) if times else 0.0


def fit(
    measurements: Sequence[Measurement], *, model: str = "", hardware: str = ""
) -> AttentionTimeModel:
    """The non-negative model with the least sum of squared RELATIVE errors.

    Relative, because the longest steps would otherwise decide everything. The optimum under
    non-negativity is the ordinary least-squares solution on the terms it uses, so all 31
    choices of terms are solved and the best without a negative coefficient is taken.

    Raises:
        FitRefusedError: fewer than two measurements, or a mean relative error above
            ``MAX_MEAN_RELATIVE_ERROR``.
    """
    if len(measurements) < 2:
        raise FitRefusedError(f"at least 2 measurements are needed, got {len(measurements)}")
    rows = [_terms(m.cached, m.bsz) for m in measurements]
    # Divided by the measured time on both sides, and every column by its largest value, so that
    # the equations are about numbers near one.
    scale = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    design = [
        [value / factor / m.seconds for value, factor in zip(row, scale, strict=True)]
        for row, m in zip(rows, measurements, strict=True)
    ]
    best: list[float] | None = None
    best_error = float("inf")
    for count in range(1, len(scale) + 1):
        for used in itertools.combinations(range(len(scale)), count):
            solution = _least_squares(design, used)
            if solution is None or min(solution) < 0:
                continue
            error = sum(
                (sum(row[k] * c for k, c in zip(used, solution, strict=True)) - 1.0) ** 2
                for row in design
            )
            # A further term must earn its place, or rounding would decide which is used.
            if error < best_error * (1 - 1e-9):
                best_error = error
                best = [0.0] * len(scale)
                for k, coefficient in zip(used, solution, strict=True):
                    best[k] = coefficient / scale[k]
    if best is None:
        raise FitRefusedError("no model with non-negative terms describes the measurements")
    fixed_s, token_s, cached_s, cross_s, square_s = best
    plain = AttentionTimeModel(fixed_s, token_s, cached_s, cross_s, square_s)
    residuals = tuple(
        Residual(m.cached, m.bsz, m.seconds, plain.batch_s([(m.cached, m.bsz)]))
        for m in measurements
    )
    mean = sum(residual.relative_error for residual in residuals) / len(residuals)
    if mean > MAX_MEAN_RELATIVE_ERROR:
        raise FitRefusedError(
            f"the attention-time model is off by {mean:.1%} on average, "
            f"more than {MAX_MEAN_RELATIVE_ERROR:.0%}: measure again on an idle machine",
            mean,
        )
    return msgspec.structs.replace(
        plain, mean_relative_error=mean, residuals=residuals, model=model, hardware=hardware
    )


def _terms(cached: int, bsz: int) -> tuple[float, ...]:
    """In the order of the model's coefficients."""
    return 1.0, float(bsz), float(cached), float(bsz) * cached, float(bsz) * bsz


def _least_squares(design: Sequence[Sequence[float]], used: Sequence[int]) -> list[float] | None:
    """Coefficients of ``used`` columns that bring every row's sum nearest to 1, by the normal
    equations; None when they have no unique solution."""
    size = len(used)
    columns = [[row[k] for row in design] for k in used]
    matrix = [
        [sum(x * y for x, y in zip(a, b, strict=True)) for b in columns] + [sum(a)] for a in columns
    ]
    largest = max(matrix[k][k] for k in range(size))
    for k in range(size):
        pivot = max(range(k, size), key=lambda r: abs(matrix[r][k]))
        if abs(matrix[pivot][k]) <= _SINGULAR * largest:
            return None
        matrix[k], matrix[pivot] = matrix[pivot], matrix[k]
        for r in range(k + 1, size):
            factor = matrix[r][k] / matrix[k][k]
            for c in range(k, size + 1):
                matrix[r][c] -= factor * matrix[k][c]
    solution = [0.0] * size
    for k in reversed(range(size)):
        known = sum(matrix[k][c] * solution[c] for c in range(k + 1, size))
        solution[k] = (matrix[k][size] - known) / matrix[k][k]
    return solution
