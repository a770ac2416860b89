"""Seeded draws on CPU can be taken back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from dualpath.engine.rewind import RewindableGenerator, begin_step  # noqa: E402 - needs torch

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
