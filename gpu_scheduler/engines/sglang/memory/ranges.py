"""balloond's driver as the engine uses it: protocols of its ranges of addresses, and of the lease that makes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class KvRange(Protocol):
    """balloond.driver.range.ElasticRange, as far as the engine uses it."""

    address: int
    extent_bytes: int
    extents: NDArray[np.int64]
    """Of each index, the first of those that are mapped as one extent and leave only together."""
    wake_fd: int
    cached_bytes: int
    """Of prefixes that the engine could evict now, as it said last."""

    @property
    def refused(self) -> bool:
        """Whether balloond had nothing for what was asked last."""
        ...

    @property
    def woken(self) -> bool:
        """Whether `wake_fd` is readable."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Owned, reserve and quarantined."""
        ...

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]: ...

    def take_tied(self) -> list[int]: ...

    def release(self, indices: Sequence[int]) -> None: ...

    def located(self, indices: Iterable[int]) -> list[tuple[int, int]]: ...

    def headroom(self) -> int: ...

    def overage_bytes(self) -> int: ...

    def take_reclaims(self) -> int: ...

    def reclaimed(self) -> None: ...

    def usage(self, used_bytes: int, cached: Sequence[tuple[float, int]]) -> None: ...

    def empty(self) -> None: ...

    def lower(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


class OfferingRange(KvRange, Protocol):
    """The same for an engine of several ranks."""

    def offer(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]: ...

    def take(self, indices: Sequence[int]) -> None: ...


class WeightsRangeDriver(Protocol):
    """balloond.driver.weights.WeightsRange, as far as the engine uses it."""

    address: int

    def grow(self, total_bytes: int) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class PieceRangeDriver(Protocol):
    """balloond.driver.pieces.PieceRange, as far as the engine uses it. What maps raises NoMemory."""

    @property
    def address(self) -> int: ...

    @property
    def mapped_bytes(self) -> int: ...

    @property
    def taken_bytes(self) -> int: ...

    def reserve(self, nbytes: int) -> None: ...

    def take(self, nbytes: int) -> int: ...

    def give(self, address: int) -> None: ...

    def trim(self) -> None: ...

    def leave(self) -> None: ...

    def come_back(self) -> None: ...

    def close(self) -> None: ...


class Driver(Protocol):
    """One lease with balloond and what can be made on it."""

    weights_extent_bytes: int

    @property
    def lease_id(self) -> str: ...

    @property
    def limit_bytes(self) -> int:
        """The most KV that the lease may hold now."""
        ...

    def kv_range(self, span_bytes: int, *, alone: bool) -> OfferingRange:
        """`alone`: no other rank has to have the same addresses mapped in the same way, so growth may be in large
        extents."""
        ...

    def weights_range(self, span_bytes: int) -> WeightsRangeDriver: ...

    def piece_range(self, span_bytes: int) -> PieceRangeDriver: ...

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """A tensor of bytes over addresses that need not be mapped yet."""
        ...

    def close(self) -> None: ...
