"""The thread that copies between buffers and cache for all sessions of an engine.

What sessions asked for while it was busy goes out as one submission: the loads of all requests of
a batch for one layer, say. It waits for nothing but the copies themselves, and several are under
way at a time, because an export that waits for the model must not hold up the next layer's load.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from dualpath.transfer.copying import COPY_TIMEOUT_S, Copy, CopyEngine, CopyFailed, Fence
from dualpath.transfer.descriptors import Descriptors

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 30.0
_SPIN_S: Final = 200e-6
_NAP_S: Final = 50e-6
GROUP_BYTES: Final = 64 << 20
"""What is joined into one submission; more would hold up what is asked for meanwhile."""


@dataclass(slots=True, eq=False)
class _Job:
    runs: Descriptors
    after: Sequence[Fence]
    enter: Callable[[], bool]
    leave: Callable[[int], None]
    future: Future[int] = field(default_factory=Future)
    entered: bool = False


@dataclass(slots=True, eq=False)
class _Group:
    jobs: list[_Job]
    copy: Copy
    since_s: float


@dataclass(slots=True)
class CopyCounts:
    """``jobs`` that were asked for and the ``submissions`` they became."""

    jobs: int = 0
    submissions: int = 0


class CopyThread:
    """See the module's text. The thread starts with the first copy.

    Args:
        engine: gives the engine; asked at every submission.

    Thread safety: ``copy`` and ``close`` from any thread.
    """

    def __init__(self, engine: Callable[[], CopyEngine]) -> None:
        self._engine = engine
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._under_way: list[_Group] = []
        self._owed: set[_Job] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.counts = CopyCounts()

    def copy(
        self,
        runs: Descriptors,
        after: Sequence[Fence] = (),
        enter: Callable[[], bool] = lambda: True,
        leave: Callable[[int], None] = lambda nbytes: None,
    ) -> Future[int]:
        """Ask for a copy; returns at once.

        Args:
            after: what must be reached before anything is read or written.
            enter: asked by the thread just before; False: copy nothing.
            leave: told afterwards how many bytes were copied, if ``enter`` said True: also after
                a failure, then 0.

        Returns:
            The bytes copied, once every one is at its target; ``CopyFailed`` otherwise. It cannot
            be cancelled.
        """
        job = _Job(runs, after, enter, leave)
        job.future.set_running_or_notify_cancel()
        with self._starting:
            if self._closing:
                raise CopyFailed("the copy thread has ended")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dualpath-copy", daemon=True)
                self._thread.start()
            self._owed.add(job)
            self._jobs.put(job)
        job.future.add_done_callback(lambda _: self._owed.discard(job))
        return job.future

    def close(self) -> None:
        """Copy what was asked for, end the thread and close the engine. Idempotent.

        A copy that waits for a device which never gets there would keep this for ever: then the
        thread is left behind, and with it the engine, whose memory it may still use.
        """
        with self._starting:
            first, self._closing = not self._closing, True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.error("copies are still under way after %g s; not closing", _CLOSE_S)
                return
        if first:
            self._engine().close()

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a bug; whoever waits must not wait for ever
            logger.exception("the copy thread died")
            with self._starting:
                self._closing = True
            failure = CopyFailed(f"the copy thread died: {type(error).__name__}: {error}")
            for job in list(self._owed):
                if not job.future.done():
                    job.future.set_exception(failure)
                    if job.entered:  # vLLM's thread may be waiting for just this
                        job.leave(0)

    def _serve(self) -> None:
        closing = False
        event_s = time.monotonic()
        while not closing or self._under_way:
            jobs: list[_Job] = []
            total = 0
            try:
                # With copies under way the queue is only looked at.
                entry = self._jobs.get(block=not self._under_way and not closing)
                while True:
                    if entry is None:
                        closing = True
                    else:
                        jobs.append(entry)
                        total += entry.runs.nbytes
                    if total >= GROUP_BYTES:
                        break
                    entry = self._jobs.get_nowait()
            except queue.Empty:
                pass
            if jobs:
                self._submit(jobs)
            if jobs or self._look_after():
                event_s = time.monotonic()
            elif self._under_way and time.monotonic() - event_s > _SPIN_S:
                time.sleep(_NAP_S)

    def _submit(self, jobs: list[_Job]) -> None:
        """Those that have to wait for the model apart from those that need not."""
        free: list[_Job] = []
        fenced: list[tuple[_Job, list[Fence]]] = []
        for job in jobs:
            self.counts.jobs += 1
            if not job.enter():
                job.future.set_result(0)
                continue
            job.entered = True
            try:
                waiting = [fence for fence in job.after if not fence.reached()]
            except CopyFailed as error:
                self._end([job], error)
                continue
            if waiting:
                fenced.append((job, waiting))
            else:
                free.append(job)
        self._submit_group(free, [])
        self._submit_group(
            [job for job, _ in fenced], [fence for _, waiting in fenced for fence in waiting]
        )
        self._look_after()

    def _submit_group(self, jobs: list[_Job], after: Sequence[Fence]) -> None:
        if not jobs:
            return
        runs = Descriptors.joined([job.runs for job in jobs])
        self.counts.submissions += 1
        try:
            copy = self._engine().submit(runs, after)
        except CopyFailed as error:
            self._end(jobs, error)
        else:
            self._under_way.append(_Group(jobs, copy, time.monotonic()))

    def _look_after(self) -> bool:
        """Finish what is over; whether anything was."""
        over = []
        for group in self._under_way:
            try:
                if group.copy.reached():
                    self._end(group.jobs, None)
                    over.append(group)
                elif time.monotonic() - group.since_s > COPY_TIMEOUT_S:
                    raise CopyFailed(
                        f"{group.copy.nbytes} bytes by {self._engine().name}: not over after "
                        f"{COPY_TIMEOUT_S:g} s"
                    )
            except CopyFailed as error:
                self._end(group.jobs, error)
                over.append(group)
        if over:
            self._under_way = [group for group in self._under_way if group not in over]
        return bool(over)

    @staticmethod
    def _end(jobs: Sequence[_Job], error: CopyFailed | None) -> None:
        for job in jobs:
            # The error is known to whoever asked before anybody may use the memory again.
            if error is not None:
                job.future.set_exception(error)
            job.leave(0 if error is not None else job.runs.nbytes)
            if error is None:
                job.future.set_result(job.runs.nbytes)
