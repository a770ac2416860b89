"""Block I/O by NIXL's POSIX plugin (Linux AIO): one submission for a whole batch.

Why each batch has an agent to itself (a *lane*): the plugin keeps one queue per agent and polls it
for everybody, so an error in one batch says nothing reliable about the I/O of another in the same
queue. A lane that reported an error is destroyed before anything else happens - destroying its
AIO context waits in the kernel until none of its I/O is left - and its batch is done again block
by block with plain system calls, which is how each block gets its own errno.

Linux AIO and not io_uring: tearing down a ring does not wait for what it has in flight, and the
slots' owner must know that nothing will write there any more.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from errno import ETIMEDOUT
from typing import Any, Final

from dualpath.storage.blockio import Direction, IoOp, run_op
from dualpath.storage.limiter import remaining_s
from dualpath.storage.memory import address_of
from dualpath.storage.nixl_module import Nixl
from dualpath.storage.types import UnsupportedIoError

log = logging.getLogger(__name__)

DEFAULT_LANES: Final = 4
_BACKEND: Final = "POSIX"
_FIRST_POLL_S: Final = 20e-6
_LONGEST_POLL_S: Final = 1e-3
_serial = itertools.count()


class _Lane:
    """One NIXL agent with its own AIO queue, used by one thread at a time."""

    def __init__(self, nixl: Nixl, queue_depth: int) -> None:
        self._nixl = nixl
        api = nixl.api
        # The progress thread would burn a core; polling while a batch is under way is enough.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._name = f"dualpath-storage-{os.getpid()}-{next(_serial)}"
        self._agent: Any = api.nixl_agent(self._name, config)
        depth = str(queue_depth)
        self._agent.create_backend(
            _BACKEND, {"use_aio": "true", "ios_pool_size": depth, "kernel_queue_size": depth}
        )

    def transfer(self, direction: Direction, ops: Sequence[IoOp]) -> str:
        """Move everything; returns what went wrong, empty when nothing did.

        After an error nothing of the batch is in flight and the lane is destroyed.
        """
        try:
            self._run(direction, ops)
        except self._nixl.errors as error:
            failure = str(error) or type(error).__name__
        else:
            return ""
        # Outside the except clause: the exception's traceback keeps the transfer's handle alive,
        # and with it the agent whose destruction is what proves the I/O to be over.
        self.destroy()
        return failure

    def _run(self, direction: Direction, ops: Sequence[IoOp]) -> None:
        agent = self._agent
        memory, files = [], []
        for op in ops:
            offset = 0
            for view in (op.header, op.slot):
                memory.append((address_of(view), view.nbytes, 0))
                files.append((offset, view.nbytes, op.fd))
                offset += view.nbytes
        held = [
            agent.register_memory([(*m, "") for m in memory], "DRAM", [_BACKEND]),
            agent.register_memory(
                [(0, op.total_bytes, op.fd, "") for op in ops], "FILE", [_BACKEND]
            ),
        ]
        handle = agent.initialize_xfer(
            direction.name,
            agent.get_xfer_descs(memory, "DRAM"),
            agent.get_xfer_descs(files, "FILE"),
            self._name,
            backends=[_BACKEND],
        )
        state = agent.transfer(handle)
        if state == "PROC":
            try:
                state = self._poll(handle)
            except BaseException:  # an interrupt of this thread
                # The memory may only be given back when the transfer is over.
                self._poll(handle)
                raise
        if state != "DONE":
            raise RuntimeError(f"transfer ended in state {state}")
        handle.release()
        for registered in held:
            agent.deregister_memory(registered, [_BACKEND])

    def _poll(self, handle: Any) -> str:
        pause_s = _FIRST_POLL_S
        while True:
            state: str = self._agent.check_xfer_state(handle)
            if state != "PROC":
                return state
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def destroy(self) -> None:
        """Drop the agent: its AIO context is destroyed, which waits for its I/O."""
        self._agent = None


class NixlPosixIO:
    """Batches through NIXL. See ``BlockIO`` for the contract.

    Args:
        nixl: from ``find_nixl``.
        batch_blocks: most operations in one call.
        lanes: batches in flight at once; further callers wait for a free lane.

    Raises:
        UnsupportedIoError: the plugin is missing or cannot start here.
    """

    name = "nixl"

    def __init__(self, nixl: Nixl, batch_blocks: int, lanes: int = DEFAULT_LANES) -> None:
        self._nixl = nixl
        self._queue_depth = 2 * batch_blocks
        self._tokens: queue.LifoQueue[_Lane | None] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._lane_errors = 0
        for _ in range(lanes - 1):
            self._tokens.put(None)  # below the made ones in the stack: made when first needed
        try:
            self._tokens.put(_Lane(nixl, self._queue_depth))
        except nixl.errors as error:
            raise UnsupportedIoError(f"NIXL's POSIX plugin does not start: {error}") from error

    @property
    def lane_errors(self) -> int:
        """Batches that NIXL failed and that were done again block by block."""
        with self._lock:
            return self._lane_errors

    def transfer(self, direction: Direction, ops: Sequence[IoOp], deadline: float) -> list[int]:
        """See ``BlockIO.transfer``."""
        try:
            lane = self._tokens.get(timeout=remaining_s(deadline, time.monotonic()))
        except queue.Empty:
            return [ETIMEDOUT] * len(ops)
        try:
            failure, lane = self._attempt(lane, direction, ops)
        except BaseException:  # an interrupt too: the next caller makes a lane of its own
            self._tokens.put(None)
            raise
        self._tokens.put(lane)
        if not failure:
            return [0] * len(ops)
        with self._lock:
            self._lane_errors += 1
        log.warning(
            "NIXL %s of %d blocks failed (%s); doing each again by itself",
            direction.value, len(ops), failure,
        )  # fmt: skip
        return [run_op(direction, op) for op in ops]

    def _attempt(
        self, lane: _Lane | None, direction: Direction, ops: Sequence[IoOp]
    ) -> tuple[str, _Lane | None]:
        if lane is None:
            try:
                lane = _Lane(self._nixl, self._queue_depth)
            except self._nixl.errors as error:
                return f"no new lane: {error}", None
        failure = lane.transfer(direction, ops)
        return failure, None if failure else lane

    def close(self) -> None:
        """See ``BlockIO.close``."""
        while True:
            try:
                lane = self._tokens.get_nowait()
            except queue.Empty:
                return
            if lane is not None:
                lane.destroy()
