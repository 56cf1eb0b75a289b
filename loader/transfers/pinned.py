"""Host memory of images that CUDA knows, so that copy engines read and write it themselves."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from cuda.bindings import driver as cu

from balloond.backends.cuda import Context, call

_PIECE_BYTES = 256 << 20
"""Bytes of host memory that are registered at a time: in some hundredths of a second, so that progress is reported."""
_THREADS = min(8, os.cpu_count() or 1)
"""Threads that have the kernel give the pages of a piece."""
_POPULATE_WRITE = 23
"""Number of MADV_POPULATE_WRITE, which Linux has since 5.14."""
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FOR_ALL_DEVICES = cu.CU_MEMHOSTREGISTER_PORTABLE


class PinnedImage:
    """The host memory of one image."""

    def __init__(self, address: int, nbytes: int, threads: ThreadPoolExecutor) -> None:
        self.address = address
        self._nbytes = nbytes
        self._threads = threads
        self._reached = 0
        self._registering = threading.Lock()

    def reach(self, end: int) -> None:
        """Registers bytes [0, end), as far as they are not registered."""
        with self._registering:
            while self._reached < end:
                start, piece = self.address + self._reached, min(_PIECE_BYTES, self._nbytes - self._reached)
                self._populate(start, piece)
                call(cu.cuMemHostRegister, start, piece, _FOR_ALL_DEVICES)
                self._reached += piece

    def _populate(self, start: int, nbytes: int) -> None:
        """Has the kernel give the pages, to several threads at a time: registering would do it in one, at 2 GB/s. What
        fails here fails there again, and is reported."""
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
        self._images: dict[int, tuple[PinnedImage, Context]] = {}
        self._lock = threading.Lock()

    def of(self, weights: memoryview, context: Context) -> PinnedImage:
        address = _address(weights)
        with self._lock:
            if address not in self._images:
                self._images[address] = PinnedImage(address, weights.nbytes, self._threads), context
            return self._images[address][0]

    def forget(self, weights: memoryview) -> None:
        with self._lock:
            image, context = self._images.pop(_address(weights), (None, None))
        if image is not None and context is not None:
            context.enter()
            image.forget()


def _address(weights: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(weights))


def pieces(start: int, nbytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, bytes) of parts of at most `most_bytes` that lie within one registration each: no copy may cross two."""
    end = start + nbytes
    while start < end:
        part = min(end, start + most_bytes, (start // _PIECE_BYTES + 1) * _PIECE_BYTES) - start
        yield start, part
        start += part
