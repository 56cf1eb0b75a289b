"""Transfers numbers of KV blocks (envelopes) between the host, which chooses them, and the device, where SGLang keeps
them.

The token path never waits for a GPU. Numbers that the host chose are copied out of pinned memory; numbers that SGLang
freed arrive in pinned memory some time later; events behind the copies are polled, never waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gpu_scheduler.engines.sglang.policy.layout import distinct

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.policy.envelopes import Indices

_BUFFERS = 64
"""Number of the largest buffers, in pinned memory, that are made at first: as many copies may be under way before
another is made."""
_BUFFER_NUMBERS = 4096
"""Most numbers in one buffer."""
_SIZES = (_BUFFER_NUMBERS // 64, _BUFFER_NUMBERS // 8, _BUFFER_NUMBERS)
"""Numbers in buffers. Smaller ones are parts of a large one: an eviction frees thousands of short prefixes, each with a
copy of its own, and a buffer stays pinned as long as the model is here."""
_AT_ONCE = _BUFFERS * _BUFFER_NUMBERS
"""Numbers from which a copy to the device is waited for. Only moves of KV send so many, and the device is idle then."""


class Ids(Protocol):
    """The transfers of one device."""

    def send(self, numbers: Indices) -> torch.Tensor:
        """The numbers, (n,), as an int64 tensor on the device."""
        ...

    def fetch(self, numbers: torch.Tensor, arrived: Callable[[Indices], None]) -> None:
        """Copies numbers to the host, and calls `arrived` with them, sorted and without repeats, once they are there:
        from `poll` or `settle`, or at once where there is nothing to wait for."""
        ...

    def arrived(self) -> int:
        """Number of copies that have arrived since the start; never waits."""
        ...

    def poll(self, most: int | None = None) -> None:
        """Hands over the copies that have arrived; never waits. `most`: number of copies since the start, of which
        later ones are left for the next call."""
        ...

    def settle(self) -> None:
        """Waits for all copies under way and hands them over."""
        ...


class HostIds:
    """The transfers of a device whose memory is the host's: everything arrives at once."""

    def send(self, numbers: Indices) -> torch.Tensor:
        import torch

        return torch.from_numpy(numbers)

    def fetch(self, numbers: torch.Tensor, arrived: Callable[[Indices], None]) -> None:
        arrived(distinct(numbers.numpy()))

    def arrived(self) -> int:
        return 0

    def poll(self, most: int | None = None) -> None:
        pass

    def settle(self) -> None:
        pass


class CudaIds:
    """The transfers of a GPU. Copies are queued on the calling thread's current stream."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._idle: dict[int, list[torch.Tensor]] = {size: [] for size in _SIZES}
        """Buffers that no copy uses, by size."""
        self._idle[_BUFFER_NUMBERS] += [self._buffer() for _ in range(_BUFFERS)]
        self._events: list[torch.cuda.Event] = []
        self._outgoing: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        """Buffers that are being copied to the device, each with the event behind its copy."""
        self._booked = 0
        """Number of copies to the host that were handed over since the start."""
        self._incoming: deque[tuple[torch.cuda.Event, torch.Tensor, int, Callable[[Indices], None]]] = deque()
        """Copies to the host that were not handed over: (event behind it, buffer, count of numbers, function that takes
        them)."""

    def _buffer(self) -> torch.Tensor:
        return self._torch.empty(_BUFFER_NUMBERS, dtype=self._torch.int64, pin_memory=True)

    def _take(self, count: int) -> torch.Tensor:
        """A pinned buffer for `count` numbers that no copy uses; a burst makes more of them rather than wait."""
        while self._outgoing and self._outgoing[0][0].query():
            self._give(*self._outgoing.popleft())
        size = next(size for size in _SIZES if count <= size)
        idle = self._idle[size]
        if not idle:
            idle += self._buffer().split(size)
        return idle.pop()

    def _give(self, event: torch.cuda.Event, buffer: torch.Tensor) -> None:
        """Takes back the event and the buffer of a copy that is done."""
        self._events.append(event)
        self._idle[len(buffer)].append(buffer)

    def _mark(self) -> torch.cuda.Event:
        event = self._events.pop() if self._events else self._torch.cuda.Event()
        event.record()
        return event

    def send(self, numbers: Indices) -> torch.Tensor:
        if len(numbers) > _AT_ONCE:
            return self._torch.from_numpy(numbers).to(self._device)
        there = self._torch.empty(len(numbers), dtype=self._torch.int64, device=self._device)
        for start in range(0, len(numbers), _BUFFER_NUMBERS):
            part = numbers[start : start + _BUFFER_NUMBERS]
            buffer = self._take(len(part))
            buffer.numpy()[: len(part)] = part
            there[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
            self._outgoing.append((self._mark(), buffer))
        return there

    def fetch(self, numbers: torch.Tensor, arrived: Callable[[Indices], None]) -> None:
        parts = numbers.split(_BUFFER_NUMBERS)
        got: list[Indices] = []

        def last(part: Indices) -> None:
            got.append(part)
            arrived(distinct(np.concatenate(got)))

        for index, part in enumerate(parts, start=1):
            buffer = self._take(len(part))
            buffer[: len(part)].copy_(part, non_blocking=True)
            self._incoming.append((self._mark(), buffer, len(part), last if index == len(parts) else got.append))

    def arrived(self) -> int:
        return self._booked + sum(1 for _ in takewhile(lambda copy: copy[0].query(), self._incoming))

    def poll(self, most: int | None = None) -> None:
        while self._incoming and (most is None or self._booked < most) and self._incoming[0][0].query():
            self._hand_over_first()

    def settle(self) -> None:
        while self._incoming:
            self._incoming[0][0].synchronize()
            self._hand_over_first()

    def _hand_over_first(self) -> None:
        event, buffer, count, arrived = self._incoming.popleft()
        self._booked += 1
        numbers = buffer.numpy()[:count].copy()
        self._give(event, buffer)
        arrived(numbers)


def ids_of(device: torch.device) -> Ids:
    """The transfers of a device."""
    return HostIds() if device.type == "cpu" else CudaIds(device)
