"""Which copy engine an engine gets: the one asked for, or the best that is there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from dualpath.transfer.copy_cnic import CnicCopyEngine
from dualpath.transfer.copy_cuda import CudaCopyEngine
from dualpath.transfer.copy_host import HostCopyEngine
from dualpath.transfer.copying import CopyEngine
from dualpath.transfer.cuda_driver import CudaDriver, CudaError, CudaMissing, LibCuda
from dualpath.transfer.errors import AgentSetupError, NixlMissing
from dualpath.transfer.memory import Region
from dualpath.transfer.nixl_backend import UcxSettings

logger = logging.getLogger(__name__)

CopyChoice = Literal["auto", "cnic", "cuda", "host"]


class CopyEngineMissing(RuntimeError):
    """The copy engine that was asked for cannot work here; the message says why."""


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """What a copy engine works on.

    Attributes:
        agent: name for a NIXL agent of its own; unique in the cluster and per start.
        nic: the NIC paired with the GPU.
        device: number of the GPU that holds the cache; None when it is host memory.
        cache: the device cache's memory.
        host: buffers.
    """

    agent: str
    nic: UcxSettings
    device: int | None
    cache: Sequence[Region]
    host: Sequence[Region]


def open_copy_engine(
    choice: CopyChoice, place: CopyPlace, driver: Callable[[], CudaDriver] = LibCuda
) -> CopyEngine:
    """The engine named ``choice``. ``auto``: ``host`` for a cache in host memory; for one on a
    GPU ``cnic`` where the NIC is an RDMA device, else ``cuda``.

    Raises:
        CopyEngineMissing: it cannot work here. ``auto`` raises it too, rather than falling back:
            a GPU whose NIC was configured and does not work is a fault to be mended.
    """
    if choice == "auto":
        choice = "host" if place.device is None else "cnic" if place.nic.rdma else "cuda"
    try:
        engine = _open(choice, place, driver)
    except (CudaError, CudaMissing, NixlMissing, AgentSetupError) as error:
        raise CopyEngineMissing(f"engine.copy: {choice!r} cannot work here: {error}") from error
    logger.info("host-device copies: %s", engine.name)
    return engine


def _open(choice: CopyChoice, place: CopyPlace, driver: Callable[[], CudaDriver]) -> CopyEngine:
    if choice == "host":
        if place.device is not None:
            raise CopyEngineMissing(
                f"engine.copy: 'host' cannot reach the cache, which is on GPU {place.device}; "
                "use 'auto', 'cuda' or 'cnic'"
            )
        return HostCopyEngine()
    if choice == "cuda":
        if place.device is None:
            raise CopyEngineMissing(
                "engine.copy: 'cuda' needs a cache on a GPU, and this one is host memory; "
                "use 'auto' or 'host'"
            )
        cache, pinned = (
            [(region.address, region.nbytes) for region in regions]
            for regions in (place.cache, place.host)
        )
        return CudaCopyEngine(driver(), place.device, cache, pinned)
    # Nothing is copied by CUDA then, but where the model's work has got to is CUDA's to know.
    clock = None if place.device is None else CudaCopyEngine(driver(), place.device)
    try:
        return CnicCopyEngine(
            f"{place.agent}/copy",
            place.nic,
            [*place.cache, *place.host],
            fence=None if clock is None else clock.fence,
            on_close=None if clock is None else clock.close,
        )
    except BaseException:  # an interrupt too: the clock's streams are ours until we return
        if clock is not None:
            clock.close()
        raise
