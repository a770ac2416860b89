"""The attention-time model: recovers what made the measurements, refuses what it cannot explain."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.scheduler.attention_time import (
    AttentionTimeModel,
    FitRefusedError,
    Measurement,
    fit,
)  # fmt: skip

pytestmark = pytest.mark.unit

GRID = [(cached, bsz) for cached in (0, 1000, 8000, 64000) for bsz in (1, 64, 512, 4096)]
coefficients = st.tuples(*(
    st.just(0.0) | st.floats(0.1, 10.0).map(lambda x, unit=unit: x * unit)
    for unit in (1e-3, 1e-6, 1e-7, 1e-10, 1e-10)
)).filter(any)  # fmt: skip


def measured(truth: AttentionTimeModel, noise: tuple[float, ...] = (1.0,)) -> list[Measurement]:
    return [
        Measurement(c, b, truth.batch_s([(c, b)]) * noise[i % len(noise)])
        for i, (c, b) in enumerate(GRID)
        if truth.batch_s([(c, b)]) > 0
    ]


@settings(max_examples=60, deadline=None)
@given(coefficients)
def test_exact_measurements_give_exact_predictions(values: tuple[float, ...]) -> None:
    truth = AttentionTimeModel(*values)
    measurements = measured(truth)
    if len(measurements) < 2:
        return
    model = fit(measurements, model="m", hardware="h")
    assert model.mean_relative_error < 1e-4
    for m in measurements:
        assert model.batch_s([(m.cached, m.bsz)]) == pytest.approx(m.seconds, rel=1e-3)
    assert min(model.fixed_s, model.token_s, model.cached_s, model.cross_s, model.square_s) >= 0


def test_noise_is_averaged_and_kept_in_the_residuals() -> None:
    # +-10 % in turn: the fit stays near the truth, the residuals say what was off.
    truth = AttentionTimeModel(1e-3, 1e-6, 1e-8, 1e-9, 5e-10)
    model = fit(measured(truth, (1.1, 0.9, 0.9, 1.1)))
    assert 0.05 < model.mean_relative_error < 0.12
    assert len(model.residuals) == len(GRID)
    assert sum(r.relative_error for r in model.residuals) / len(GRID) == pytest.approx(
        model.mean_relative_error
    )
    # Not among the measurements:
    assert model.batch_s([(30_000, 1000)]) == pytest.approx(
        truth.batch_s([(30_000, 1000)]), rel=0.1
    )


def test_measurements_without_a_pattern_are_refused() -> None:
    truth = AttentionTimeModel(1e-3, 1e-6, 1e-8, 1e-9, 5e-10)
    with pytest.raises(FitRefusedError, match=r"off by \d+\.\d% on average") as caught:
        fit(measured(truth, (1.0, 9.0, 0.2, 3.0, 0.5)))
    assert caught.value.mean_relative_error is not None
    assert caught.value.mean_relative_error > 0.15


def test_time_that_falls_with_tokens_gives_no_negative_term() -> None:
    model = fit([Measurement(0, 100, 1.0), Measurement(0, 200, 0.98), Measurement(0, 300, 0.96)])
    assert model.request_s(0, 300) >= model.request_s(0, 100)
    assert model.fixed_s == pytest.approx(0.98, rel=0.02)


def test_too_few_and_impossible_measurements_are_refused() -> None:
    with pytest.raises(FitRefusedError, match="at least 2"):
        fit([Measurement(0, 1, 1.0)])
    for bad in ((-1, 1, 1.0), (0, 0, 1.0), (0, 1, 0.0), (0, 1, float("nan"))):
        with pytest.raises(ValueError, match="are needed"):
            Measurement(*bad)


def test_a_model_survives_being_saved() -> None:
    model = fit(measured(AttentionTimeModel(1e-3, 1e-6, 0.0, 1e-9, 0.0)), model="m", hardware="h")
    assert msgspec.json.decode(msgspec.json.encode(model), type=AttentionTimeModel) == model


def test_a_step_pays_its_fixed_part_once_and_nothing_when_empty() -> None:
    model = AttentionTimeModel(1.0, 0.5, 0.25, 0.0, 0.0)
    assert model.batch_s([(4, 2), (0, 2)]) == 1.0 + (1.0 + 1.0) + 1.0
    assert model.batch_s([]) == model.batch_s([(100, 0)]) == 0.0
