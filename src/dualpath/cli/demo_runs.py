"""The demo's three runs: a plain vLLM, and the cluster in two modes, each on its own store."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dualpath.cli.demo_talks import agents_of
from dualpath.config import ClusterConfig, Mode, StorageConfig
from dualpath.engine.program import engine_argv
from dualpath.lab.plain import plain_vllm
from dualpath.serve.local import local_cluster
from dualpath.serve.supervise import Listener
from dualpath.workload import (
    Conversation,
    Progress,
    ReplayOptions,
    ReplayResult,
    replay,
)

REFERENCE: Final = "reference"
SNIC_TOLERANCE: Final = 0.02

Reporter = Callable[[str], AbstractContextManager[Callable[[Progress], None]]]
Starter = Callable[[str], AbstractContextManager[tuple[Listener, Callable[[], None]]]]


@dataclass(frozen=True, slots=True)
class Stage:
    """What all runs share.

    Attributes:
        config: the cluster, without mode and store.
        talks: the conversations.
        folder: for stores, logs and records; one sub-folder a run.
        starting, replaying: show what goes on.
    """

    config: ClusterConfig
    talks: list[Conversation]
    folder: Path
    starting: Starter
    replaying: Reporter


async def reference(stage: Stage) -> ReplayResult:
    """The conversations on one vLLM without connector.

    Raises:
        StartFailed: it did not start.
        RequestFailed: it could not be used.
    """
    log = stage.folder / REFERENCE / "vllm.log"
    with stage.starting("plain vLLM") as (listen, settled):
        async with plain_vllm(stage.config, log, listen) as url:
            settled()
            return await _replay(stage, url, REFERENCE)


async def run_mode(stage: Stage, mode: Mode) -> ReplayResult:
    """The conversations on the cluster in ``mode``, on an empty store.

    Raises:
        ConfigError, StartFailed, ClusterFailed: it did not start.
        RequestFailed: it could not be used.
    """
    folder = stage.folder / mode.value
    # New, so empty. What is written goes around the page cache where the file system lets it
    # (storage.direct); where not, the SNIC limit makes the time of a read, cached or not.
    storage = StorageConfig(path=str(folder / "store"))
    config = msgspec.structs.replace(stage.config, mode=mode, storage=storage)
    with stage.starting(f"{mode.value}: prefill and decode engines") as (listen, settled):
        async with local_cluster(config, folder / "run", engine_argv, listen) as running:
            settled()
            return await _replay(stage, running.url, mode.value)


async def _replay(stage: Stage, url: str, name: str) -> ReplayResult:
    options = ReplayOptions(url=url, out=stage.folder / name, keep_records=True)
    with stage.replaying(name) as progress:
        return await replay(agents_of(stage.talks), options, progress=progress)


def snic_bytes(result: ReplayResult) -> int | None:
    """Storage bytes read by all nodes in a run; None when the front did not say."""
    snic = result.figures.snic
    return None if snic is None else sum(snic.values())


def snic_agree(left: int | None, right: int | None) -> bool:
    """Whether two runs read the same bytes from storage, within ``SNIC_TOLERANCE``. Two runs that
    read nothing do not count as agreeing: nothing was shown."""
    if not left or not right:
        return False
    return abs(left - right) <= SNIC_TOLERANCE * max(left, right)


def ratio(left: float | None, right: float | None) -> float | None:
    """``left / right``, None when either is unknown or zero."""
    return left / right if left and right else None


def cpu_note() -> str:
    """What the figures were measured on."""
    return f"{os.cpu_count()} CPU cores"
