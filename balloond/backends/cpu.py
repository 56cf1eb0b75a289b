"""Host memory as a device: a memfd is an extent, PROT_NONE the reserved range, MAP_FIXED the map.

Memory is taken when a page is first touched, zeroed by the kernel, and gone when the last mapping and descriptor are.
"""

from __future__ import annotations

import ctypes
import os

from balloond.backends import base

PAGE_BYTES = base.PAGE_BYTES["cpu"]

_PROT_NONE, _PROT_RW = 0, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NOTHING = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE


def _failed(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


class CpuMaker:
    """Makes extents of host memory."""

    page_bytes = PAGE_BYTES

    def create(self, nbytes: int) -> int:
        fd = os.memfd_create("prism-extent")
        try:
            os.ftruncate(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
        return fd


class _Done:
    """A fence that is always done: host code has no queue, and no longer touches what it released."""

    def done(self) -> bool:
        return True


class CpuMapper:
    """Maps extents of host memory into this process."""

    page_bytes = PAGE_BYTES

    def reserve(self, span: int) -> int:
        # mmap aligns to 4 KiB only; the slack around the aligned part is given back.
        length = span + PAGE_BYTES
        address = _mmap(None, length, _PROT_NONE, _NOTHING, -1, 0)
        if address == _FAILED:
            raise _failed(f"reserving {span} bytes of addresses")
        first = -(-address // PAGE_BYTES) * PAGE_BYTES
        if first > address:
            _munmap(address, first - address)
        if first + span < address + length:
            _munmap(first + span, address + length - first - span)
        return int(first)

    def release(self, address: int, span: int) -> None:
        if _munmap(address, span):
            raise _failed(f"releasing {span} bytes of addresses")

    def map(self, address: int, fd: int, nbytes: int) -> None:
        if _mmap(address, nbytes, _PROT_RW, _MAP_SHARED | _MAP_FIXED, fd, 0) != address:
            raise _failed(f"mapping {nbytes} bytes")

    def unmap(self, address: int, nbytes: int) -> None:
        if _mmap(address, nbytes, _PROT_NONE, _NOTHING | _MAP_FIXED, -1, 0) != address:
            raise _failed(f"unmapping {nbytes} bytes")

    def poison(self, address: int, nbytes: int) -> None:
        # All ones is NaN in float16, bfloat16, float32 and float64.
        ctypes.memset(address, 0xFF, nbytes)

    def fence(self) -> _Done:
        return _Done()
