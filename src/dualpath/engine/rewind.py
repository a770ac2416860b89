"""Seeded draws that must not count.

A step that finds the KV it wanted to load missing samples a token all the same, and vLLM drops it:
the token is drawn again once the KV is computed, and it must be the same one that an engine draws
which never lost anything.

On CPU there is more to do, because vLLM cannot take any draw back there.
A step that computes only part of a prompt samples a token all the same, and vLLM drops it and sets
the request's generator back by an offset. torch's CPU generators have none: it raises, and the
engine dies with every request on it. So each seeded request gets a generator that knows its state
before the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RewindableGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator with the two methods that vLLM uses to undo the last step's draw."""

    @classmethod
    def like(cls, other: torch.Generator) -> RewindableGenerator:
        """One that goes on where ``other`` is."""
        generator = cls()
        generator.set_state(other.get_state())
        return generator

    def remember(self) -> None:
        """A step begins: this is what it may be set back to."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """What vLLM subtracts from; its value has no meaning here."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Back to before the step, which is all that vLLM asks for."""
        self.set_state(self._before)


def begin_step(runner: Any) -> None:
    """Prepare the generators of vLLM's model runner for the sampling of a step."""
    batch = runner.input_batch
    for index, generator in batch.generators.items():
        if not isinstance(generator, RewindableGenerator):
            generator = RewindableGenerator.like(generator)
            batch.generators[index] = generator
            # The batch forgets it when the request is preempted, and takes it from here again.
            runner.requests[batch.req_ids[index]].generator = generator
        generator.remember()


@contextmanager
def dropped_draws(runner: Any, request_ids: Collection[str]) -> Iterator[None]:
    """What is drawn inside for these requests has never been drawn."""
    batch = runner.input_batch
    before = [
        (generator, generator.get_state())
        for index, generator in batch.generators.items()
        if request_ids and batch.req_ids[index] in request_ids
    ]
    yield
    for generator, state in before:
        generator.set_state(state)
