"""Copies for GPUs: extents are mapped here for the time of a copy, and the device's copy engine moves the bytes.

Everything is under way at once: while some chunks are copied, the extents of the next are mapped and their part of the
image is registered.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends import cuda_hardware
from balloond.backends.cuda import Context, CudaMapper, call
from loader.metrics import CONTEXT
from loader.policy.chunks import Chunk
from loader.transfers.base import Borrowed

_AHEAD = 16
"""Chunks given to the device and not done: the device is never without work, and a cancelled copy ends soon."""
_PIECE_BYTES = 256 << 20
"""Of host memory, registered at a time: in some hundredths of a second, so that progress is told."""
_THREADS = min(8, os.cpu_count() or 1)
"""That have the kernel give the pages of a piece."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_QUIET_WAIT = cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC | cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
_FOR_ALL_DEVICES = cu.CU_MEMHOSTREGISTER_PORTABLE


class _Image:
    """The host memory of one image."""

    def __init__(self, address: int, nbytes: int, threads: ThreadPoolExecutor) -> None:
        self.address = address
        self._nbytes = nbytes
        self._threads = threads
        self._reached = 0
        self._registering = threading.Lock()

    def reach(self, end: int) -> None:
        """Bytes [0, end) are registered when this returns."""
        with self._registering:
            while self._reached < end:
                start, piece = self.address + self._reached, min(_PIECE_BYTES, self._nbytes - self._reached)
                self._populate(start, piece)
                call(cu.cuMemHostRegister, start, piece, _FOR_ALL_DEVICES)
                self._reached += piece

    def _populate(self, start: int, nbytes: int) -> None:
        """Has the kernel give the pages, to several threads at a time: registering would do it by one, at 2 GB/s. What
        fails here fails there again, and is told."""
        part = -(-nbytes // _THREADS // mmap.PAGESIZE) * mmap.PAGESIZE
        parts = [(start + at, min(part, nbytes - at)) for at in range(0, nbytes, part)]
        list(self._threads.map(lambda each: _madvise(*each, _POPULATE_WRITE), parts))

    def forget(self) -> None:
        for start in range(0, self._reached, _PIECE_BYTES):
            call(cu.cuMemHostUnregister, self.address + start)


class Pinned:
    """Images whose memory CUDA knows, so that the copy engines read and write it themselves (55 GB/s instead of 10).
    Registering takes longer than a copy: it is done once, when a copy first comes there, and lasts until the image
    goes."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="populate")
        self._images: dict[int, tuple[_Image, Context]] = {}
        self._lock = threading.Lock()

    def of(self, weights: memoryview, context: Context) -> _Image:
        address = _address(weights)
        with self._lock:
            if address not in self._images:
                self._images[address] = _Image(address, weights.nbytes, self._threads), context
            return self._images[address][0]

    def forget(self, weights: memoryview) -> None:
        with self._lock:
            image, context = self._images.pop(_address(weights), (None, None))
        if image is not None and context is not None:
            context.enter()
            image.forget()


def _address(weights: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(weights))


def _pieces(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the parts that lie within one registration each: no copy may cross two."""
    end = start + nbytes
    while start < end:
        part = min(end, (start // _PIECE_BYTES + 1) * _PIECE_BYTES) - start
        yield start, part
        start += part


Move = Callable[[int, int, int, Any], None]
"""(device address, host address, bytes, stream)"""


def _to_device(device: int, host: int, nbytes: int, stream: Any) -> None:
    call(cu.cuMemcpyHtoDAsync, device, host, nbytes, stream)


def _to_host(device: int, host: int, nbytes: int, stream: Any) -> None:
    call(cu.cuMemcpyDtoHAsync, host, device, nbytes, stream)


class CudaTransfer:
    """See Transfer. Several copies may run at a time, each in a thread of its own."""

    def __init__(self, index: int, pinned: Pinned) -> None:
        self._index = index
        self._pinned = pinned
        self._context = Context(index)
        self._mapper = CudaMapper(index)
        self._open = threading.Lock()
        self._opened = False

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        self._copy(extents, image, plan, done, _to_host)

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        self._copy(extents, image, plan, done, _to_device)

    def _copy(
        self,
        extents: Sequence[Borrowed],
        weights: memoryview,
        plan: Sequence[Chunk],
        done: Callable[[Chunk], None],
        move: Move,
    ) -> None:
        if not plan:
            return
        self._enter()
        image = self._pinned.of(weights, self._context)
        offsets = list(accumulate((extent.nbytes for extent in extents), initial=0))
        mapped = 0
        with self._addresses(offsets[-1]) as base, _Queue(done) as queue:
            for chunk in plan:
                while mapped <= chunk.extent:
                    extent = extents[mapped]
                    self._mapper.map(base + offsets[mapped], extent.fd, extent.nbytes)
                    mapped += 1
                image.reach(chunk.at + chunk.nbytes)
                device = base + offsets[chunk.extent] + chunk.offset
                for at, nbytes in _pieces(chunk.at, chunk.nbytes):
                    move(device + at - chunk.at, image.address + at, nbytes, queue.stream)
                queue.add(chunk)
            queue.drain()

    @contextmanager
    def _addresses(self, span: int) -> Iterator[int]:
        """Addresses for a copy; at its end whatever is mapped there goes with them."""
        base = self._mapper.reserve(span)
        try:
            yield base
        finally:
            self._mapper.release(base, span)

    def _enter(self) -> None:
        """The context, made by the first copy; what it takes of the device is told."""
        with self._open:
            if not self._opened:
                before = cuda_hardware.look(self._index).free_bytes
                self._context.enter()
                after = cuda_hardware.look(self._index).free_bytes
                CONTEXT.labels(f"cuda:{self._index}").set(max(0, before - after))
                self._opened = True
        self._context.enter()


class _Queue:
    """One copy's stream, with an event behind each chunk. When it is left nothing is under way any more, also after a
    failure: then the chunks are not done."""

    def __init__(self, done: Callable[[Chunk], None]) -> None:
        self._done = done
        self._under_way: deque[tuple[Any, Chunk]] = deque()
        self._free: list[Any] = []

    def __enter__(self) -> _Queue:
        self.stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            call(cu.cuStreamSynchronize, self.stream)
        finally:
            for event in [*self._free, *(event for event, _ in self._under_way)]:
                call(cu.cuEventDestroy, event)
            call(cu.cuStreamDestroy, self.stream)

    def add(self, chunk: Chunk) -> None:
        """All that was given to the stream for the chunk lies behind its event. Waits when too much is under way."""
        event = self._free.pop() if self._free else call(cu.cuEventCreate, _QUIET_WAIT)
        call(cu.cuEventRecord, event, self.stream)
        self._under_way.append((event, chunk))
        while len(self._under_way) > _AHEAD:
            self._finish_one()

    def drain(self) -> None:
        while self._under_way:
            self._finish_one()

    def _finish_one(self) -> None:
        event, chunk = self._under_way.popleft()
        call(cu.cuEventSynchronize, event)
        self._free.append(event)
        self._done(chunk)
