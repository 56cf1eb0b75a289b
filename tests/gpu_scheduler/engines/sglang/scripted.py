"""A KV range without memory: what the engine asked of the driver, and a limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpu_scheduler.engines.sglang.policy.envelopes import Indices


class ScriptedRange:
    """Grants the lowest free extents up to `limit` extents."""

    address = 0
    wake_fd = -1
    woken = False

    def __init__(self, extent_bytes: int, limit: int, there: int = 10_000) -> None:
        """`there`: extents that the device has for it."""
        self.extent_bytes = extent_bytes
        self.extents: Indices = np.arange(10_000)
        self.limit = limit
        self.there = there
        self.slow = False
        """It answers only who waits."""
        self.cached_bytes = 0
        self.refused = False
        self.instead: list[int] = []
        """What could be evicted, as was said with each question."""
        self.owned: set[int] = set()
        self.waits: list[float] = []
        self.emptied = False

    @property
    def mapped_bytes(self) -> int:
        return len(self.owned) * self.extent_bytes

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]:
        self.waits.append(round(timeout_s, 6))
        self.instead.append(instead_bytes)
        free = (index for index in range(10_000) if index not in self.owned)
        there = max(0, self.there - len(self.owned)) if timeout_s > 0 or not self.slow else 0
        got = [next(free) for _ in range(min(count, self.headroom(), there))]
        self.refused = not got and (timeout_s > 0 or not self.slow)
        self.owned |= set(got)
        return got

    def take_tied(self) -> list[int]:
        return []

    def release(self, indices: Sequence[int]) -> None:
        assert set(indices) <= self.owned
        self.owned -= set(indices)

    def headroom(self) -> int:
        return max(0, self.limit - len(self.owned))

    def overage_bytes(self) -> int:
        return max(0, len(self.owned) - self.limit) * self.extent_bytes

    def take_reclaims(self) -> int:
        return 0

    def reclaimed(self) -> None: ...

    def usage(self, used_bytes: int, cached: Sequence[tuple[float, int]]) -> None: ...

    def empty(self) -> None:
        assert not self.owned
        self.emptied = True

    def lower(self, timeout_s: float) -> None:
        """It keeps no reserve."""

    def close(self) -> None: ...


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now
