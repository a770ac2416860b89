"""The copy thread: many requests' copies as one submission, none behind another's fence."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from dualpath.transfer import copy_thread
from dualpath.transfer.copy_host import HostCopyEngine
from dualpath.transfer.copy_thread import CopyThread
from dualpath.transfer.copying import Copy, CopyEngine, CopyFailed, Fence, Runs
from dualpath.transfer.descriptors import Descriptors

pytestmark = pytest.mark.unit

SIZE = 100
DEADLINE_S = 10.0


class Gate:
    """A fence that opens when told."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def reached(self) -> bool:
        return self.open.is_set()


class Deferred:
    """A copy that happens when its fences are reached."""

    def __init__(self, runs: Descriptors, after: Sequence[Fence]) -> None:
        self._runs, self._after = runs, after
        self._done = False
        self.nbytes = runs.nbytes

    def reached(self) -> bool:
        if not self._done and all(fence.reached() for fence in self._after):
            self._done = True
            HostCopyEngine().copy(self._runs)
        return self._done

    def wait(self, timeout_s: float) -> None:
        raise NotImplementedError

    def before(self, stream: int) -> None:
        raise NotImplementedError


class Device(CopyEngine):
    """An engine that does nothing before its fences, and whose first submission can be held up."""

    name = "device"

    def __init__(self) -> None:
        self.submissions: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        self.entered = threading.Event()
        self.fail = False
        self.closed = 0

    def fence(self, stream: int) -> Fence | None:
        return None

    def submit(self, runs: Runs, after: Sequence[Fence] = ()) -> Copy:
        assert isinstance(runs, Descriptors)
        self.submissions.append(len(runs))
        self.entered.set()
        assert self.hold.wait(DEADLINE_S)
        if self.fail:
            raise CopyFailed("the device is gone")
        return Deferred(runs, after)

    def close(self) -> None:
        self.closed += 1


class Memory:
    """Blocks to copy from and to."""

    def __init__(self, blocks: int) -> None:
        rng = np.random.default_rng(1)
        self.source = rng.integers(0, 256, (blocks, SIZE), dtype=np.uint8)
        self.target = np.zeros_like(self.source)

    def run(self, block: int) -> Descriptors:
        return Descriptors(
            *(
                np.array([value], dtype=np.uint64)
                for value in (
                    self.source[block].ctypes.data,
                    self.target[block].ctypes.data,
                    SIZE,
                )
            )
        )


def test_what_comes_while_it_is_busy_is_one_submission() -> None:
    device, memory = Device(), Memory(20)
    thread = CopyThread(lambda: device)
    device.hold.clear()
    first = thread.copy(memory.run(0))
    assert device.entered.wait(DEADLINE_S)
    others = [thread.copy(memory.run(block)) for block in range(1, 20)]
    device.hold.set()
    assert [future.result(DEADLINE_S) for future in (first, *others)] == [SIZE] * 20
    assert device.submissions == [1, 19]
    assert (memory.source == memory.target).all()
    assert (thread.counts.jobs, thread.counts.submissions) == (20, 2)
    thread.close()
    assert device.closed == 1


def test_a_group_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_thread, "GROUP_BYTES", 3 * SIZE)
    device, memory = Device(), Memory(10)
    thread = CopyThread(lambda: device)
    device.hold.clear()
    futures = [thread.copy(memory.run(0))]
    assert device.entered.wait(DEADLINE_S)
    futures += [thread.copy(memory.run(block)) for block in range(1, 10)]
    device.hold.set()
    for future in futures:
        future.result(DEADLINE_S)
    assert device.submissions == [1, 3, 3, 3]
    thread.close()


def test_a_load_goes_past_an_export_that_waits_for_the_model() -> None:
    device, memory, gate = Device(), Memory(3), Gate()
    thread = CopyThread(lambda: device)
    export = thread.copy(memory.run(0), [gate])
    assert thread.copy(memory.run(1)).result(DEADLINE_S) == SIZE
    assert not export.done()
    assert not memory.target[0].any()
    gate.open.set()
    assert export.result(DEADLINE_S) == SIZE
    assert (memory.target[0] == memory.source[0]).all()
    thread.close()


def test_fences_of_one_request_do_not_hold_up_those_asked_for_with_it() -> None:
    device, memory, gate = Device(), Memory(3), Gate()
    thread = CopyThread(lambda: device)
    device.hold.clear()
    thread.copy(memory.run(0))
    assert device.entered.wait(DEADLINE_S)
    waiting, free = thread.copy(memory.run(1), [gate]), thread.copy(memory.run(2))
    device.hold.set()
    assert free.result(DEADLINE_S) == SIZE
    assert not waiting.done()
    gate.open.set()
    waiting.result(DEADLINE_S)
    thread.close()


def test_a_copy_that_is_not_wanted_any_more_moves_nothing() -> None:
    device, memory = Device(), Memory(2)
    thread = CopyThread(lambda: device)
    told: list[int] = []
    assert thread.copy(memory.run(0), enter=lambda: False, leave=told.append).result(5.0) == 0
    assert thread.copy(memory.run(1), leave=told.append).result(5.0) == SIZE
    assert not memory.target[0].any()
    assert told == [SIZE]
    thread.close()


def test_a_failure_is_everybodys_in_the_group_and_known_before_the_memory_is_given_back() -> None:
    device, memory = Device(), Memory(2)
    thread = CopyThread(lambda: device)
    device.fail = True
    known: list[tuple[int, bool]] = []
    future = thread.copy(memory.run(0), leave=lambda nbytes: known.append((nbytes, future.done())))
    with pytest.raises(CopyFailed, match="the device is gone"):
        future.result(DEADLINE_S)
    thread.close()
    assert known == [(0, True)]


def test_a_copy_that_does_not_end_fails_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_thread, "COPY_TIMEOUT_S", 0.02)
    device, memory = Device(), Memory(2)
    thread = CopyThread(lambda: device)
    future = thread.copy(memory.run(0), [Gate()])
    with pytest.raises(CopyFailed, match=r"100 bytes by device: not over after 0.02 s"):
        future.result(DEADLINE_S)
    thread.close()


def test_a_bug_leaves_nobody_waiting() -> None:
    device, memory = Device(), Memory(3)
    thread = CopyThread(lambda: device)

    def broken() -> bool:
        raise ZeroDivisionError

    futures = [thread.copy(memory.run(0), enter=broken)]
    with pytest.raises(CopyFailed, match="the copy thread died: ZeroDivisionError"):
        futures[0].result(DEADLINE_S)
    with pytest.raises(CopyFailed, match="has ended"):
        thread.copy(memory.run(1))
    thread.close()


def test_close_copies_what_was_asked_for() -> None:
    device, memory = Device(), Memory(5)
    thread = CopyThread(lambda: device)
    futures = [thread.copy(memory.run(block)) for block in range(5)]
    thread.close()
    thread.close()
    assert all(future.result(0) == SIZE for future in futures)
    assert device.closed == 1
    idle = CopyThread(lambda: device)
    idle.close()
    assert device.closed == 2
