"""The few calls of the CUDA driver that copies need, with errors as exceptions. No logic.

The driver's own C interface, by ctypes: this room imports neither torch nor CUDA's Python packages,
and the driver is there wherever a GPU works. Nothing is loaded before ``LibCuda`` is made.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, Protocol

from dualpath.transfer.descriptors import U64

_NOT_READY: Final = 600
_NON_BLOCKING: Final = 1
_DISABLE_TIMING: Final = 2
_PORTABLE: Final = 1
_STREAM_ORDER: Final = 1
_OVERLAP_WITH_COMPUTE: Final = 1
_BATCH_SINCE: Final = 12080
"""CUDA 12.8. The entry point has this version's signature whatever the driver's own version is."""


class CudaError(RuntimeError):
    """The driver refused a call, or reports that earlier work on the GPU failed."""


class CudaMissing(RuntimeError):
    """There is no CUDA driver, or no GPU."""


class CudaDriver(Protocol):
    """What the copy engine asks of CUDA. Handles are integers, as CUDA's own pointers are.

    Thread safety: as the driver's, that is, any thread; the context is per thread, see
    ``use_context``. Every call may raise ``CudaError``.
    """

    batches: bool
    """Whether ``copy_batch`` exists in this driver."""

    def current_context(self) -> int:
        """The calling thread's context, 0 for none."""
        ...

    def retain_primary(self, device: int) -> int:
        """The context that everybody in this process shares on a GPU (torch's too)."""
        ...

    def release_primary(self, device: int) -> None:
        """Undo ``retain_primary``."""
        ...

    def use_context(self, context: int) -> None:
        """Make it the calling thread's."""
        ...

    def create_stream(self) -> int:
        """A stream of the least priority that does not wait for the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Give a stream back; what is queued on it still happens."""
        ...

    def create_event(self) -> int:
        """An event without times, which makes it cheap."""
        ...

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        ...

    def record(self, event: int, stream: int) -> None:
        """The event is reached when everything queued on the stream until now is over."""
        ...

    def wait_event(self, stream: int, event: int) -> None:
        """Work queued on the stream from now on runs after the event's latest recording."""
        ...

    def reached(self, event: int) -> bool:
        """Whether the event is reached. Never waits."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue one copy, host or device on either side."""
        ...

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        """Queue many copies with one call. Among themselves they have no order."""
        ...

    def pin(self, address: int, nbytes: int) -> None:
        """Lock host memory, so that copies of it are asynchronous."""
        ...

    def unpin(self, address: int) -> None:
        """Undo ``pin``."""
        ...


class _Location(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


_Handle: Final = ctypes.c_void_p
_Pointer: Final = ctypes.c_uint64
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_Handle, ctypes.c_int),
    "cuDevicePrimaryCtxRetain": (_Handle, ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxGetCurrent": (_Handle,),
    "cuCtxSetCurrent": (_Handle,),
    "cuCtxGetStreamPriorityRange": (_Handle, _Handle),
    "cuStreamCreateWithPriority": (_Handle, ctypes.c_uint, ctypes.c_int),
    "cuStreamDestroy_v2": (_Handle,),
    "cuStreamWaitEvent": (_Handle, _Handle, ctypes.c_uint),
    "cuEventCreate": (_Handle, ctypes.c_uint),
    "cuEventDestroy_v2": (_Handle,),
    "cuEventRecord": (_Handle, _Handle),
    "cuEventQuery": (_Handle,),
    "cuMemcpyAsync": (_Pointer, _Pointer, ctypes.c_size_t, _Handle),
    "cuMemHostRegister_v2": (_Handle, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (_Handle,),
    "cuGetErrorString": (ctypes.c_int, _Handle),
}
_BATCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    _Handle, _Handle, _Handle, ctypes.c_size_t,
    _Handle, _Handle, ctypes.c_size_t,
    _Handle, _Handle,
)  # fmt: skip


class LibCuda:
    """``CudaDriver`` by the driver's shared library.

    Args:
        library: its name or path.

    Raises:
        CudaMissing: it cannot be loaded, lacks a call, or finds no GPU.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, ctypes.c_int
            self._call("cuInit", 0)
        except (OSError, AttributeError, CudaError) as error:
            raise CudaMissing(f"the CUDA driver {library} cannot be used: {error}") from error
        self._batch: Any = self._find_batch()
        self.batches = self._batch is not None

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            said = text.value.decode() if text.value else "unknown error"
            raise CudaError(f"{name}: {said} ({status})")

    def _find_batch(self) -> Any:
        try:
            find = self._library.cuGetProcAddress_v2
        except AttributeError:
            return None  # a driver older than CUDA 12.0
        find.argtypes = (ctypes.c_char_p, _Handle, ctypes.c_int, ctypes.c_uint64, _Handle)
        find.restype = ctypes.c_int
        entry, found = ctypes.c_void_p(), ctypes.c_int()
        status = find(
            b"cuMemcpyBatchAsync", ctypes.byref(entry), _BATCH_SINCE, 0, ctypes.byref(found)
        )
        return _BATCH(entry.value) if not status and entry.value else None

    def current_context(self) -> int:
        """See ``CudaDriver``."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def retain_primary(self, device: int) -> int:
        """See ``CudaDriver``."""
        number, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number.value)
        return context.value or 0

    def release_primary(self, device: int) -> None:
        """See ``CudaDriver``."""
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        self._call("cuDevicePrimaryCtxRelease_v2", number.value)

    def use_context(self, context: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuCtxSetCurrent", context)

    def create_stream(self) -> int:
        """See ``CudaDriver``."""
        least, greatest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        self._call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self._call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, least.value)
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuStreamDestroy_v2", stream)

    def create_event(self) -> int:
        """See ``CudaDriver``."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _DISABLE_TIMING)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def reached(self, event: int) -> bool:
        """See ``CudaDriver``."""
        status = self._library.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        self._check("cuEventQuery", status)
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        """See ``CudaDriver``."""
        attributes = _CopyAttributes(source_access_order=_STREAM_ORDER, flags=_OVERLAP_WITH_COMPUTE)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._check(
            f"cuMemcpyBatchAsync of {len(sizes)} copies",
            self._batch(
                targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
                ctypes.addressof(attributes), ctypes.addressof(first), 1,
                ctypes.addressof(failed), stream,
            ),
        )  # fmt: skip

    def pin(self, address: int, nbytes: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE)

    def unpin(self, address: int) -> None:
        """See ``CudaDriver``."""
        self._call("cuMemHostUnregister", address)
