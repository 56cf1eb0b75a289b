"""One stretch of a KV range: the addresses of one kind of KV, with indices of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.ranges import KvRange


class KvStretch:
    """Stretch number `number` of a range; implements `ranges.KvAddresses`."""

    def __init__(self, of: KvRange, number: int) -> None:
        self._of = of
        self._number = number
        self.extent_bytes = of.extent_bytes
        self.extents: NDArray[np.int64] = of.extents(number)

    @property
    def refused(self) -> bool:
        return self._of.refused(self._number)

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]:
        return self._of.acquire(count, timeout_s=timeout_s, instead_bytes=instead_bytes, stretch=self._number)

    def take_tied(self) -> list[int]:
        return self._of.take_tied(self._number)

    def release(self, indices: Sequence[int]) -> None:
        self._of.release(indices, stretch=self._number)

    def located(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        return self._of.located(indices, stretch=self._number)

    def headroom(self) -> int:
        return self._of.headroom(self._number)
