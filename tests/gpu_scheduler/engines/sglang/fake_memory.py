"""A stand-in for balloond and its driver in one process: real mmap pages, a limit that the test moves through a
socket.

`python -m tests.gpu_scheduler.engines.sglang.fake_memory --channel-fd N` is an engine on it.
`Load.balloond_socket` names a Unix datagram socket that the engine binds; the test sends "limit BYTES" or "reclaim
BYTES".
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_NONE, _RW, _PRIVATE, _FIXED, _ANON, _NORESERVE = 0, 3, 0x02, 0x10, 0x20, 0x4000


def _map(address: int | None, nbytes: int, protection: int) -> int:
    flags = _PRIVATE | _ANON | _NORESERVE | (_FIXED if address is not None else 0)
    result = _libc.mmap(address, nbytes, protection, flags, -1, 0)
    assert result not in (None, ctypes.c_void_p(-1).value)
    return int(result)


class FakeRange:
    def __init__(self, span: int, extent_bytes: int, limit: int, poison: bool) -> None:
        self.extent_bytes = extent_bytes
        self.n_extents = -(-span // extent_bytes)
        self.address = _map(None, self.n_extents * extent_bytes, _NONE)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.limit = limit
        self.poison = poison
        self.owned: set[int] = set()
        self._reclaim = 0
        self.reports: list[Any] = []

    def acquire(self, count: int, *, timeout_s: float = 0.0) -> list[int]:
        count = max(0, min(count, self.headroom()))
        got: list[int] = []
        for index in range(self.n_extents):
            if len(got) == count:
                break
            if index not in self.owned:
                got.append(index)
        for index in got:
            address = self.address + index * self.extent_bytes
            _map(address, self.extent_bytes, _RW)
            if self.poison:
                ctypes.memset(address, 0xFF, self.extent_bytes)
        self.owned |= set(got)
        return got

    def release(self, indices: Sequence[int]) -> None:
        for index in indices:
            assert index in self.owned
            self.owned.discard(index)
            _map(self.address + index * self.extent_bytes, self.extent_bytes, _NONE)

    def headroom(self) -> int:
        return max(0, self.limit // self.extent_bytes - len(self.owned))

    def overage_bytes(self) -> int:
        return max(0, len(self.owned) * self.extent_bytes - self.limit)

    def take_reclaims(self) -> int:
        wanted, self._reclaim = self._reclaim, 0
        return wanted

    def reclaimed(self) -> None: ...

    def usage(self, used_bytes: int, cached: Sequence[tuple[float, int]]) -> None: ...

    def empty(self) -> None:
        assert not self.owned

    def close(self) -> None:
        _libc.munmap(self.address, self.n_extents * self.extent_bytes)
        os.close(self.wake_fd)

    def command(self, text: str) -> None:
        verb, _, number = text.partition(" ")
        if verb == "limit":
            self.limit = int(number)
        else:
            self._reclaim += int(number)
        os.eventfd_write(self.wake_fd, 1)


class FakeWeights:
    def __init__(self, span: int) -> None:
        self.span = span
        self.address = _map(None, span, _NONE)

    def grow(self, total_bytes: int) -> None:
        _map(self.address, total_bytes, _RW)

    def leave(self) -> None:
        _map(self.address, self.span, _NONE)

    def close(self) -> None:
        _libc.munmap(self.address, self.span)


class FakeDriver:
    lease_id = "fake"

    def __init__(self, load: Any) -> None:
        self._load = load
        self._range: FakeRange | None = None
        self.limit_bytes = int(os.environ.get("FAKE_LIMIT", 1 << 30))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(load.balloond_socket)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            text = self._socket.recv(100).decode()
            if not text:
                return
            if text.startswith("limit"):
                self.limit_bytes = int(text.split()[1])
            if self._range is not None:
                self._range.command(text)

    def kv_range(self, span_bytes: int) -> FakeRange:
        self._range = FakeRange(span_bytes, self._load.kv_extent_bytes, self.limit_bytes, self._load.poison_fresh_pages)
        return self._range

    def kv_bytes(self, kv: Any) -> tuple[int, int]:
        return len(kv.owned) * kv.extent_bytes, 0

    def weights_range(self, span_bytes: int) -> FakeWeights:
        return FakeWeights(span_bytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)

    def close(self) -> None:
        path = self._load.balloond_socket
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", path)
        os.unlink(path)
        time.sleep(0)


def open_memory(load: Any, options: Any) -> Any:
    from gpu_scheduler.engines.sglang.memory import Memory

    return Memory(FakeDriver(load), load.weights_extent_bytes)


if __name__ == "__main__":
    from gpu_scheduler.engines.sglang.__main__ import main

    main(open_memory=open_memory)
