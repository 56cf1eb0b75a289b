"""A GPU's memory through the driver's virtual memory calls.

An extent is one physical allocation, exported as a descriptor and then let go: a process that holds the descriptor, or
a mapping, holds the memory. Neither `cuMemCreate` nor the export needs a context, so a process that only makes extents
takes no memory of the device for itself.

N of "cuda:N" is the ordinal that CUDA gives the device in this process (`CUDA_VISIBLE_DEVICES` counts), so all
processes of a node have to see the same devices in the same order.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends import base

PAGE_BYTES = base.PAGE_BYTES["cuda"]

_DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ON_DEVICE = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_SUCCESS = cu.CUresult.CUDA_SUCCESS
_UNTIMED = cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
_NOT_READY = cu.CUresult.CUDA_ERROR_NOT_READY
_ERRNO = {
    cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY: errno.ENOMEM,
    cu.CUresult.CUDA_ERROR_INVALID_VALUE: errno.EINVAL,
    cu.CUresult.CUDA_ERROR_NO_DEVICE: errno.ENODEV,
    cu.CUresult.CUDA_ERROR_INVALID_DEVICE: errno.ENODEV,
    # The driver says like this that the process may open no more descriptors.
    cu.CUresult.CUDA_ERROR_OPERATING_SYSTEM: errno.EMFILE,
}


def call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> Any:
    """The result of a call of the driver, None if it has none. Raises OSError with one line."""
    try:
        error, *values = function(*arguments)
    except RuntimeError as missing:  # how the bindings say that there is no driver, or that it lacks the function
        raise OSError(errno.ENODEV, f"{function.__name__}: {missing}") from None
    _check(function, error)
    return values[0] if values else None


def _check(function: Callable[..., object], error: cu.CUresult) -> None:
    if error != _SUCCESS:
        raise OSError(_ERRNO.get(error, errno.EIO), f"{function.__name__}: {error.name}")


class Context:
    """The primary context of a device, which torch uses too. It takes some hundred MiB of the device from the first
    `enter` to the end of the process."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._context: Any = None
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Makes it the calling thread's context. Under a microsecond once it exists, so it may be called before every
        use."""
        if self._context is None:
            with self._lock:
                if self._context is None:
                    call(cu.cuInit, 0)
                    self._context = call(cu.cuDevicePrimaryCtxRetain, call(cu.cuDeviceGet, self._index))
        call(cu.cuCtxSetCurrent, self._context)


def set_stack(nbytes: int) -> int:
    """Sets the bytes of stack of every thread that the device could run, for which the calling thread's context keeps
    memory, and returns what they were before. Nothing may run. Raises OSError."""
    limit = cu.CUlimit.CU_LIMIT_STACK_SIZE
    before = int(call(cu.cuCtxGetLimit, limit))
    call(cu.cuCtxSetLimit, limit, nbytes)
    return before


def allocation(index: int) -> cu.CUmemAllocationProp:
    """Properties of memory of a device that can be exported as a descriptor."""
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = _ON_DEVICE
    properties.location.id = index
    properties.requestedHandleTypes = _DESCRIPTOR
    return properties


def access(index: int) -> cu.CUmemAccessDesc:
    """Access of a device to memory, to read and to write."""
    made = cu.CUmemAccessDesc()
    made.location.type = _ON_DEVICE
    made.location.id = index
    made.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


class CudaMaker:
    """Makes extents of a GPU's memory."""

    page_bytes = PAGE_BYTES

    def __init__(self, index: int) -> None:
        """`index`: CUDA's ordinal of the device. Raises OSError without a driver."""
        call(cu.cuInit, 0)
        self._allocation = allocation(index)

    def create(self, nbytes: int) -> int:
        handle = call(cu.cuMemCreate, nbytes, self._allocation, 0)
        try:
            return int(call(cu.cuMemExportToShareableHandle, handle, _DESCRIPTOR, 0))
        finally:
            call(cu.cuMemRelease, handle)


class _Fence:
    """Events behind the work of some streams; done when all have passed."""

    def __init__(self, events: list[Any], mapper: CudaMapper) -> None:
        self._events = events
        self._mapper = mapper

    def done(self) -> bool:
        while self._events and self._mapper.passed(self._events[-1]):
            self._mapper.recycle(self._events.pop())
        return not self._events


class CudaMapper:
    """Maps extents of a GPU's memory into this process, one by one. Giving access to an extent is what takes time: 28
    us, whatever its size, and no less for several in one call. While copies run, giving access also waits
    for about half of what they still need for the bytes under way."""

    page_bytes = PAGE_BYTES

    def __init__(self, index: int, streams: Callable[[], Sequence[int]] = lambda: (0,)) -> None:
        """`streams` gives the handles of the streams whose work may touch the memory, whenever a fence is made; 0 is
        the legacy default stream."""
        self._context = Context(index)
        self._streams = streams
        self._access = [access(index)]
        self._mapped: dict[int, tuple[int, Any]] = {}
        """Bytes and handle of each extent, by address. The mapping alone would keep the memory. To release the
        handle right after mapping would cost 12 us while memory is wanted, and save nothing when it is unmapped."""
        self._events: deque[Any] = deque()
        """Events that are free to be used again."""
        self._poison_stream: Any = None

    def reserve(self, span: int) -> int:
        self._context.enter()
        return int(call(cu.cuMemAddressReserve, span, 0, 0, 0))

    def release(self, address: int, span: int) -> None:
        self._context.enter()
        for start in list(self._mapped):
            if address <= start < address + span:
                self.unmap(start, self._mapped[start][0])
        call(cu.cuMemAddressFree, address, span)

    def map(self, address: int, fd: int, nbytes: int, accesses: Sequence[cu.CUmemAccessDesc] | None = None) -> None:
        """Maps the whole extent of `fd` at `address`. `accesses`: the devices that read and write it, if not this one
        alone."""
        accesses = self._access if accesses is None else accesses
        self._context.enter()
        handle = call(cu.cuMemImportFromShareableHandle, fd, _DESCRIPTOR)
        try:
            call(cu.cuMemMap, address, nbytes, 0, handle, 0)
            try:
                call(cu.cuMemSetAccess, address, nbytes, accesses, len(accesses))
            except OSError:
                call(cu.cuMemUnmap, address, nbytes)
                raise
        except OSError:
            call(cu.cuMemRelease, handle)
            raise
        self._mapped[address] = nbytes, handle

    def unmap(self, address: int, nbytes: int) -> None:
        self._context.enter()
        call(cu.cuMemUnmap, address, nbytes)
        end = address + nbytes
        while address < end:
            size, handle = self._mapped.pop(address)
            call(cu.cuMemRelease, handle)
            address += size

    def poison(self, address: int, nbytes: int) -> None:
        self._context.enter()
        if self._poison_stream is None:
            self._poison_stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        # All ones is NaN in every float type. The fill is waited for, or it would overtake what the next owner writes.
        call(cu.cuMemsetD8Async, address, 0xFF, nbytes, self._poison_stream)
        call(cu.cuStreamSynchronize, self._poison_stream)

    def fence(self) -> _Fence:
        self._context.enter()
        return _Fence([self._record(stream) for stream in self._streams()], self)

    def _record(self, stream: int) -> Any:
        event = self._events.pop() if self._events else call(cu.cuEventCreate, _UNTIMED)
        call(cu.cuEventRecord, event, stream)
        return event

    def passed(self, event: Any) -> bool:
        """Whether a fence's event has passed. Never waits. Raises OSError when the device has failed."""
        self._context.enter()
        (result,) = cu.cuEventQuery(event)
        if result == _NOT_READY:
            return False
        _check(cu.cuEventQuery, result)
        return True

    def recycle(self, event: Any) -> None:
        """Takes back a fence's event, which has passed."""
        self._events.append(event)
