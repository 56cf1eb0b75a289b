"""What one model holds of its device: the lease, the KV range, the weights range. The only file here that knows
balloond's driver."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.shared_range import SharedRange

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.options import Options
    from gpu_scheduler.engines.sglang.ranks import Ranks
    from protos import engine_pb2


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


class WeightsRange(Protocol):
    """balloond.driver.weights.WeightsRange, as far as the engine uses it."""

    address: int

    def grow(self, total_bytes: int) -> None: ...

    def leave(self) -> None: ...

    def close(self) -> None: ...


class PieceRange(Protocol):
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

    def weights_range(self, span_bytes: int) -> WeightsRange: ...

    def piece_range(self, span_bytes: int) -> PieceRange: ...

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """A tensor of bytes over addresses that need not be mapped yet."""
        ...

    def close(self) -> None: ...


class Memory:
    """Opened by a Load, closed when the model leaves. Addresses stay in between."""

    def __init__(self, driver: Driver, ranks: Ranks) -> None:
        self._driver = driver
        self._ranks = ranks
        self.kv: KvRange | None = None
        self._kv_span = 0
        self._weights: WeightsRange | None = None
        self._pieces: PieceRange | None = None
        self.weights_bytes = 0
        """Whole extents."""

    @property
    def lease_id(self) -> str:
        return self._driver.lease_id

    @property
    def limit_bytes(self) -> int:
        """The most KV that every rank may hold."""
        return self.kv.limit_bytes if isinstance(self.kv, SharedRange) else self._driver.limit_bytes

    def open_kv(self, span_bytes: int) -> KvRange:
        """Reserves addresses for KV; nothing is mapped."""
        assert self.kv is None
        own = self._driver.kv_range(span_bytes, alone=self._ranks.size == 1)
        kv: KvRange = own
        if self._ranks.size > 1:
            kv = SharedRange(own, self._ranks, lambda: self._driver.limit_bytes)
        self.kv = kv
        self._kv_span = -(-span_bytes // kv.extent_bytes) * kv.extent_bytes
        return kv

    def kv_tensor(self) -> torch.Tensor:
        assert self.kv is not None
        return self._driver.tensor(self.kv.address, self._kv_span)

    def open_weights(self, span_bytes: int) -> torch.Tensor:
        """Reserves addresses for weights, a tensor of bytes over them; nothing is mapped."""
        assert self._weights is None
        extent = self._driver.weights_extent_bytes  # a small model may be less than one
        span = -(-span_bytes // extent) * extent
        self._weights = self._driver.weights_range(span)
        return self._driver.tensor(self._weights.address, span)

    def need_weights(self, nbytes: int) -> None:
        """The first `nbytes` are mapped when this returns, in whole extents, zero where they were not before. Raises
        NoMemory."""
        assert self._weights is not None
        if nbytes > self.weights_bytes:
            extent = self._driver.weights_extent_bytes
            total = -(-nbytes // extent) * extent
            self._weights.grow(total)
            self.weights_bytes = total

    def map_weights(self) -> None:
        """Maps new, zero extents at the same addresses. Raises NoMemory."""
        assert self._weights is not None
        self._weights.grow(self.weights_bytes)

    def unmap_weights(self) -> None:
        """The weights leave; touching them faults until `map_weights`."""
        if self._weights is not None:
            self._weights.leave()

    def open_pieces(self, span_bytes: int) -> tuple[PieceRange, torch.Tensor]:
        """Reserves addresses for what CUDA graphs take, with a tensor of bytes over them; nothing is mapped."""
        assert self._pieces is None
        self._pieces = self._driver.piece_range(span_bytes)
        return self._pieces, self._driver.tensor(self._pieces.address, span_bytes)

    def close(self) -> None:
        """Returns everything and ends the lease. Tensors over the ranges must not be touched any more."""
        for part in (self.kv, self._weights, self._pieces):
            if part is not None:
                part.close()
        self.kv = self._weights = self._pieces = None
        self._driver.close()


OpenMemory = Callable[["engine_pb2.Load", "Options", "Ranks"], Memory]
