"""The memory that one model holds on its device: the lease, the KV range, the weights range, and the ranges for CUDA
graphs and for buffers of adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gpu_scheduler.engines.sglang.memory.ranges import Driver, KvRange, PieceRangeDriver, WeightsRangeDriver
from gpu_scheduler.engines.sglang.memory.shared_range import SharedRange

if TYPE_CHECKING:
    import torch

    from gpu_scheduler.engines.sglang.base.options import Options
    from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
    from protos import engine_pb2


class ModelMemory:
    """The memory of one model, opened by a Load and closed when the model leaves. Its addresses stay in between."""

    def __init__(self, driver: Driver, ranks: Ranks) -> None:
        self._driver = driver
        self._ranks = ranks
        self.kv: KvRange | None = None
        self._kv_spans: list[int] = []
        """Bytes of each stretch of the KV range, in whole extents."""
        self._weights: WeightsRangeDriver | None = None
        self._pieces: PieceRangeDriver | None = None
        self._adapters: WeightsRangeDriver | None = None
        self._adapters_span = 0
        self.adapters_bytes = 0
        """Bytes of the buffers of adapters, in whole pages."""
        self.weights_bytes = 0
        """Bytes of weights, in whole extents."""

    @property
    def lease_id(self) -> str:
        """balloond's name of the lease."""
        return self._driver.lease_id

    @property
    def limit_bytes(self) -> int:
        """Bytes of KV that every rank may hold."""
        return self.kv.limit_bytes if isinstance(self.kv, SharedRange) else self._driver.limit_bytes

    def open_kv(self, span_bytes: Sequence[int]) -> KvRange:
        """Reserves addresses for KV, `span_bytes` for each kind; nothing is mapped. May be called once."""
        assert self.kv is None
        own = self._driver.kv_range(span_bytes, alone=self._ranks.size == 1)
        kv: KvRange = own
        if self._ranks.size > 1:
            kv = SharedRange(own, self._ranks, lambda: self._driver.limit_bytes)
        self.kv = kv
        self._kv_spans = [-(-span // kv.extent_bytes) * kv.extent_bytes for span in span_bytes]
        return kv

    def kv_tensor(self, stretch: int = 0) -> torch.Tensor:
        """A tensor of bytes over the addresses of a stretch of the KV range, (span,) in whole extents."""
        assert self.kv is not None
        return self._driver.tensor(self.kv.address + self.kv.offset_bytes(stretch), self._kv_spans[stretch])

    def open_weights(self, span_bytes: int) -> torch.Tensor:
        """Reserves addresses for weights, and returns a tensor of bytes over them; nothing is mapped."""
        assert self._weights is None
        extent = self._driver.weights_extent_bytes  # a small model may be less than one
        span = -(-span_bytes // extent) * extent
        self._weights = self._driver.weights_range(span)
        return self._driver.tensor(self._weights.address, span)

    def need_weights(self, nbytes: int) -> None:
        """Maps the first `nbytes` of the weights range, in whole extents, zero where they were not mapped before.
        Raises NoMemory."""
        assert self._weights is not None
        if nbytes > self.weights_bytes:
            extent = self._driver.weights_extent_bytes
            total = -(-nbytes // extent) * extent
            self._weights.grow(total)
            self.weights_bytes = total

    def shrink_weights(self, nbytes: int) -> None:
        """Unmaps whole extents behind the first `nbytes` of the weights range. The device must be done with them."""
        assert self._weights is not None
        extent = self._driver.weights_extent_bytes
        total = -(-nbytes // extent) * extent
        if total < self.weights_bytes:
            self._weights.shrink(total)
            self.weights_bytes = total

    def map_weights(self) -> None:
        """Maps new, zero extents at the same addresses as before, for the weights and the buffers of adapters. Raises
        NoMemory."""
        assert self._weights is not None
        self._weights.grow(self.weights_bytes)
        if self._adapters is not None:
            self._adapters.grow(self._adapters_span)

    def unmap_weights(self) -> None:
        """Unmaps the weights and the buffers of adapters; touching them faults until `map_weights`."""
        for part in (self._weights, self._adapters):
            if part is not None:
                part.leave()

    def open_adapters(self, nbytes: int) -> torch.Tensor:
        """Maps memory for buffers of adapters, zero, and returns a tensor of bytes over it. Raises NoMemory."""
        assert self._adapters is None
        self._adapters, self._adapters_span = self._driver.adapters_range(nbytes), nbytes
        self._adapters.grow(nbytes)
        self.adapters_bytes = self._adapters.mapped_bytes
        return self._driver.tensor(self._adapters.address, nbytes)

    def open_pieces(self, span_bytes: int) -> tuple[PieceRangeDriver, torch.Tensor]:
        """Reserves addresses for memory of CUDA graphs, and returns the range and a tensor of bytes over it; nothing is
        mapped."""
        assert self._pieces is None
        self._pieces = self._driver.piece_range(span_bytes)
        return self._pieces, self._driver.tensor(self._pieces.address, span_bytes)

    def close(self) -> None:
        """Returns all memory and ends the lease. Tensors over the ranges must not be touched any more."""
        for part in (self.kv, self._weights, self._adapters, self._pieces):
            if part is not None:
                part.close()
        self.kv = self._weights = self._adapters = self._pieces = None
        self._driver.close()


OpenMemory = Callable[["engine_pb2.Load", "Options", "Ranks"], ModelMemory]
