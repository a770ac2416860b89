"""Regions that layers share: nobody writes into one before what it held was copied out."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.transfer.regions import Regions, StaleStep

pytestmark = pytest.mark.unit


def test_needs_two_regions_and_no_more_than_layers() -> None:
    for layers, regions in ((4, 1), (4, 5), (1, 2)):
        with pytest.raises(ValueError, match="cannot share"):
            Regions(layers, regions)


def test_layers_take_turns() -> None:
    regions = Regions(7, 3)
    assert [regions.region_of(layer) for layer in range(7)] == [0, 1, 2, 0, 1, 2, 0]


async def test_a_restore_waits_for_compute_and_export() -> None:
    regions = Regions(4, 2)
    regions.begin_step()
    step = regions.step
    await regions.until_free(step, 0)
    await regions.until_free(step, 1)
    waiting = asyncio.create_task(regions.until_free(step, 2))
    await asyncio.sleep(0)
    assert not waiting.done()
    regions.export_begins(0)
    regions.export_begins(0)
    regions.computed(0, None)
    regions.export_over(0)
    await asyncio.sleep(0)
    assert not waiting.done(), "one of two exports is under way"
    regions.export_over(0)
    await waiting
    assert not regions.may_fill(3), "layer 1 is not computed"
    regions.check_integrity()


async def test_a_restore_of_a_step_that_is_over_ends() -> None:
    regions = Regions(4, 2)
    regions.begin_step()
    waiting = asyncio.create_task(regions.until_free(regions.step, 2))
    await asyncio.sleep(0)
    regions.begin_step()
    with pytest.raises(StaleStep):
        await waiting
    regions.check_integrity()


async def test_the_next_step_waits_for_the_last_exports_of_this_one() -> None:
    """Four layers, three regions: the last layer and the next step's first share one."""
    regions = Regions(4, 3)
    regions.begin_step()
    for layer in range(4):
        regions.export_begins(layer)
        regions.computed(layer, None)
    for layer in (0, 1, 2):
        regions.export_over(layer)
    regions.begin_step()
    assert not regions.may_fill(0), "layer 3 is being copied out"
    assert regions.may_fill(1)
    assert not regions.wait_exported(0, 0.01)
    regions.export_over(3)
    assert regions.may_fill(0)
    assert regions.wait_exported(0, 0.01)


def test_integrity_names_an_export_that_never_ended() -> None:
    regions = Regions(4, 2)
    regions.export_begins(3)
    with pytest.raises(AssertionError, match=r"regions \[1\]"):
        regions.check_integrity()


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(2, 7),
    count=st.integers(2, 4),
    requests=st.integers(1, 3),
    steps=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_content_survives_any_interleaving(
    layers: int, count: int, requests: int, steps: int, seed: int
) -> None:
    """A model thread and a traffic loop whose copies take random turns. Each region holds the
    name of the layer whose KV it has; a cell per request. The model checks what it reads."""
    if count > layers:
        count = layers
    regions = Regions(layers, count)
    memory: list[dict[int, tuple[int, int] | None]] = [
        dict.fromkeys(range(requests)) for _ in range(count)
    ]
    host: dict[tuple[int, int], int] = {}  # (request, layer) -> steps computed
    wrong: list[str] = []
    restored = [[threading.Event() for _ in range(layers)] for _ in range(steps)]
    turn = random.Random(seed)

    async def nap() -> None:
        for _ in range(turn.randrange(4)):
            await asyncio.sleep(0)

    async def restore(step: int, number: int, layer: int) -> None:
        await regions.until_free(number, layer)
        region = memory[regions.region_of(layer)]
        for request in range(requests):
            await nap()
            region[request] = (layer, host.get((request, layer), 0))
        restored[step][layer].set()

    async def export(request: int, layer: int) -> None:
        await nap()
        held = memory[regions.region_of(layer)][request]
        if held is None or held[0] != layer:
            wrong.append(f"layer {layer} was overwritten by {held}")
        else:
            host[request, layer] = held[1]
        regions.export_over(layer)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        tasks: set[asyncio.Task[None]] = set()

        def call(work: object, *args: object) -> None:
            loop.call_soon_threadsafe(work, *args)  # type: ignore[arg-type]

        def begin(step: int) -> None:
            regions.begin_step()
            number = regions.step
            for layer in range(layers):
                tasks.add(loop.create_task(restore(step, number, layer)))

        def model() -> None:
            for step in range(steps):
                call(begin, step)
                for layer in range(layers):
                    assert regions.wait_exported(layer, 5.0)
                    assert restored[step][layer].wait(5.0)
                    region = memory[regions.region_of(layer)]
                    for request in range(requests):
                        if region[request] != (layer, step):
                            wrong.append(f"step {step} layer {layer} read {region[request]}")
                        region[request] = (layer, step + 1)
                        regions.export_begins(layer)
                        call(lambda r=request, k=layer: tasks.add(loop.create_task(export(r, k))))
                    call(regions.computed, layer, None)

        await asyncio.to_thread(model)
        while pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending)
        for task in tasks:
            task.result()

    asyncio.run(run())
    assert not wrong
    assert host == {(r, k): steps for r in range(requests) for k in range(layers)}
    regions.check_integrity()
