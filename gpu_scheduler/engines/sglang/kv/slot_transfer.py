"""Transfers numbers of KV blocks (envelopes) between the host, which chooses them, and the device, where SGLang keeps
them.

The token path never waits for a GPU: numbers chosen by the host are copied out of pinned memory, numbers freed by
SGLang arrive in pinned memory some time later, and events are only polled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.policy.envelopes import Indices

_ENDS = 64
"""Number of pinned buffers at first: as many copies may be under way without another one being made."""
_BUFFER = 4096
"""Numbers that one buffer holds."""


class Ids(Protocol):
    """The transfers of one device."""

    def send(self, numbers: Indices) -> torch.Tensor:
        """The numbers as an int64 tensor on the device, of the same shape (n,)."""
        ...

    def fetch(self, numbers: torch.Tensor, arrived: Callable[[Indices], None]) -> None:
        """Copies numbers to the host and calls `arrived` with them, each once, sorted, from `poll` or `settle`."""
        ...

    def arrived(self) -> int:
        """Number of copies that have arrived since the start; never waits."""
        ...

    def poll(self, most: int | None = None) -> None:
        """Hands over the copies that have arrived, at most the first `most` since the start; never waits."""
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
        arrived(np.unique(numbers.numpy()))

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
        self._idle = [self._buffer() for _ in range(_ENDS)]
        self._events: list[torch.cuda.Event] = []
        self._leaving: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        """Buffers that are being copied to the device, each with the event behind its copy."""
        self._booked = 0
        """Number of copies to the host that were handed over."""
        self._coming: deque[tuple[torch.cuda.Event, torch.Tensor, int, Callable[[Indices], None]]] = deque()

    def _buffer(self) -> torch.Tensor:
        return self._torch.empty(_BUFFER, dtype=self._torch.int64, pin_memory=True)

    def _take(self) -> torch.Tensor:
        """A pinned buffer that no copy uses; a burst makes more of them rather than wait."""
        while self._leaving and self._leaving[0][0].query():
            event, buffer = self._leaving.popleft()
            self._events.append(event)
            self._idle.append(buffer)
        return self._idle.pop() if self._idle else self._buffer()

    def _mark(self) -> torch.cuda.Event:
        event = self._events.pop() if self._events else self._torch.cuda.Event()
        event.record()
        return event

    def send(self, numbers: Indices) -> torch.Tensor:
        there = self._torch.empty(len(numbers), dtype=self._torch.int64, device=self._device)
        for start in range(0, len(numbers), _BUFFER):
            part = numbers[start : start + _BUFFER]
            buffer = self._take()
            buffer.numpy()[: len(part)] = part
            there[start : start + len(part)].copy_(buffer[: len(part)], non_blocking=True)
            self._leaving.append((self._mark(), buffer))
        return there

    def fetch(self, numbers: torch.Tensor, arrived: Callable[[Indices], None]) -> None:
        parts = numbers.split(_BUFFER)
        got: list[Indices] = []

        def last(part: Indices) -> None:
            got.append(part)
            arrived(np.unique(np.concatenate(got)))

        for index, part in enumerate(parts, start=1):
            buffer = self._take()
            buffer[: len(part)].copy_(part, non_blocking=True)
            self._coming.append((self._mark(), buffer, len(part), last if index == len(parts) else got.append))

    def arrived(self) -> int:
        return self._booked + sum(1 for _ in takewhile(lambda coming: coming[0].query(), self._coming))

    def poll(self, most: int | None = None) -> None:
        while self._coming and (most is None or self._booked < most) and self._coming[0][0].query():
            self._take_first()

    def settle(self) -> None:
        while self._coming:
            self._coming[0][0].synchronize()
            self._take_first()

    def _take_first(self) -> None:
        event, buffer, count, arrived = self._coming.popleft()
        self._booked += 1
        numbers = buffer.numpy()[:count].copy()
        self._events.append(event)
        self._idle.append(buffer)
        arrived(numbers)
