"""Seeded draws on CPU can be taken back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dualpath.engine.rewind import RewindableGenerator, begin_step, dropped_draws  # noqa: E402 - needs torch

pytestmark = pytest.mark.unit


def draw(generator: object) -> list[float]:
    return torch.empty(4).exponential_(generator=generator).tolist()


def test_a_dropped_draw_changes_nothing() -> None:
    plain = torch.Generator()
    plain.manual_seed(7)
    seeded = torch.Generator()
    seeded.manual_seed(7)
    expected = [draw(plain), draw(plain)]
    request = SimpleNamespace(generator=seeded)
    batch = SimpleNamespace(generators={0: seeded}, req_ids=["r"])
    runner = SimpleNamespace(input_batch=batch, requests={"r": request})
    for dropped in (True, True, False, True, False):
        begin_step(runner)
        generator = batch.generators[0]
        assert request.generator is generator
        assert isinstance(generator, RewindableGenerator)
        drawn = draw(generator)
        if dropped:
            generator.set_offset(generator.get_offset() - 4)
        else:
            assert drawn == expected.pop(0)
    assert expected == []


def test_a_failed_loads_draw_is_taken_back_and_no_others() -> None:
    def seeded() -> object:
        return torch.Generator().manual_seed(7)

    plain = seeded()
    expected = [draw(plain) for _ in range(3)]
    batch = SimpleNamespace(generators={0: seeded(), 1: seeded()}, req_ids=["lost", "good"])
    runner = SimpleNamespace(input_batch=batch)
    with dropped_draws(runner, {"lost", "of another step"}):
        assert draw(batch.generators[0]) == expected[0]
        assert draw(batch.generators[1]) == expected[0]
    with dropped_draws(runner, ()):
        assert draw(batch.generators[0]) == expected[0]
        assert draw(batch.generators[1]) == expected[1]
    assert draw(batch.generators[0]) == expected[1]
