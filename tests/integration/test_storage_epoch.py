"""The weight epoch only grows, survives everything, and is never misread as zero."""

import fcntl
import multiprocessing
from pathlib import Path

import pytest

from dualpath.storage import EpochFile, EpochState, StoreError

pytestmark = pytest.mark.integration


def test_it_starts_at_zero_and_grows(tmp_path: Path) -> None:
    epoch = EpochFile(tmp_path / "store")
    assert epoch.read() == EpochState(weight_epoch=0, in_place=False)
    assert epoch.advance(in_place=True) == EpochState(weight_epoch=1, in_place=True)
    assert EpochFile(tmp_path / "store").read() == EpochState(weight_epoch=1, in_place=True)
    assert epoch.advance(in_place=False) == EpochState(weight_epoch=2, in_place=False)
    assert [path.name for path in (tmp_path / "store").glob("*.tmp")] == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_epoch": "1"}', '{"weight_epoch": -1}'])
def test_a_damaged_file_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "epoch.json").write_text(text)
    epoch = EpochFile(tmp_path)
    with pytest.raises(StoreError, match=r"epoch\.json"):
        epoch.read()
    with pytest.raises(StoreError):
        epoch.advance(in_place=True)
    assert (tmp_path / "epoch.json").read_text() == text


def _advance(store: Path, times: int) -> None:
    for _ in range(times):
        EpochFile(store).advance(in_place=True)


def test_processes_do_not_lose_each_others_step(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_advance, args=(tmp_path, 10)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    assert EpochFile(tmp_path).read().weight_epoch == 30


def test_a_held_lock_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    epoch = EpochFile(tmp_path)
    epoch.advance(in_place=True)
    with (tmp_path / "epoch.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            epoch.advance(in_place=True, timeout_s=0.02)
    assert epoch.advance(in_place=True).weight_epoch == 2
