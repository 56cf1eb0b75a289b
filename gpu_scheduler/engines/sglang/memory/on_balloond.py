"""A model's memory from balloond, through balloond's driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from balloond.backends import mapper
from balloond.backends.base import Mapper
from balloond.driver.connection.lease import GRAPHS, WEIGHTS, GrowRefused, Kind, Lease, LeaseRefused
from balloond.driver.kv.range import ElasticRange
from balloond.driver.pieces import PieceRange
from balloond.driver.tensor import tensor_over
from balloond.driver.weights import WeightsRange
from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.memory.model_memory import ModelMemory

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.base.options import Options
    from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
    from protos import engine_pb2

_ATTACH_S = 10.0
_WEIGHTS_S = 30.0
"""Seconds to wait for weights: other leases may have to return memory first."""
_GRAPHS_EXTENT_BYTES = 32 << 20
_GRAPHS_S = 10.0


class _Weights:
    """A weights range that raises NoMemory where balloond refuses."""

    def __init__(self, lease: Lease, mapper: Mapper, span_bytes: int, extent_bytes: int, kind: Kind = WEIGHTS) -> None:
        self._range = WeightsRange(lease, mapper, span_bytes=span_bytes, extent_bytes=extent_bytes, kind=kind)
        self.address = self._range.address

    @property
    def mapped_bytes(self) -> int:
        return self._range.mapped_bytes

    def grow(self, total_bytes: int) -> None:
        try:
            self._range.grow(total_bytes, timeout_s=_WEIGHTS_S)
        except GrowRefused as error:
            raise NoMemory(f"no memory for {total_bytes} bytes of weights: {error}") from None

    def shrink(self, total_bytes: int) -> None:
        self._range.shrink(total_bytes)

    def leave(self) -> None:
        self._range.leave()

    def close(self) -> None:
        self._range.close()


class _Pieces(PieceRange):
    """A range for CUDA graphs that raises NoMemory where balloond refuses."""

    def reserve(self, nbytes: int) -> None:
        try:
            super().reserve(nbytes)
        except GrowRefused as error:
            raise NoMemory(f"no memory for {nbytes} more bytes of CUDA graphs: {error}") from None

    def come_back(self) -> None:
        try:
            super().come_back()
        except GrowRefused as error:
            raise NoMemory(f"no memory for the CUDA graphs: {error}") from None


def _streams() -> list[int]:
    """The CUDA streams that may touch the KV: the engine thread's own, and SGLang's for the forward pass."""
    streams = {torch.cuda.current_stream().cuda_stream}
    scheduler = getattr(current.model(), "scheduler", None)
    if scheduler is not None:
        streams.add(scheduler.forward_stream.cuda_stream)
    return list(streams)


class LeaseDriver:
    """One lease with balloond and the ranges on it; implements `ranges.Driver`."""

    def __init__(self, load: engine_pb2.Load, options: Options) -> None:
        """Attaches to balloond and waits at most 10 s for the lease. Raises NoMemory if balloond refuses it."""
        self._load = load
        self._options = options
        self._device = torch.device(load.device)
        self._mapper = mapper(load.device, _streams)
        self.weights_extent_bytes = load.weights_extent_bytes
        try:
            self._lease = Lease.attach(load.balloond_socket, load.device, load.model.name, timeout_s=_ATTACH_S)
        except LeaseRefused as error:
            raise NoMemory(f"no lease for {load.model.name} on {load.device}: {error}") from None

    @property
    def lease_id(self) -> str:
        return self._lease.lease_id

    @property
    def limit_bytes(self) -> int:
        return self._lease.limit.bytes

    def kv_range(self, span_bytes: Sequence[int], *, alone: bool) -> ElasticRange:
        return ElasticRange(
            self._lease,
            self._mapper,
            span_bytes=span_bytes,
            extent_bytes=self._load.kv_extent_bytes,
            low=self._options.reserve_low,
            high=self._options.reserve_high,
            large=self._options.large_extent if alone else 1,
            poison=self._load.poison_fresh_pages,
        )

    def weights_range(self, span_bytes: int) -> _Weights:
        return _Weights(self._lease, self._mapper, span_bytes, self.weights_extent_bytes)

    def adapters_range(self, span_bytes: int) -> _Weights:
        # Booked like the weights, and like CUDA graphs never lent to a loader.
        return _Weights(self._lease, self._mapper, span_bytes, self.weights_extent_bytes, GRAPHS)

    def piece_range(self, span_bytes: int) -> _Pieces:
        return _Pieces(
            self._lease,
            self._mapper,
            span_bytes=span_bytes,
            extent_bytes=_GRAPHS_EXTENT_BYTES,
            timeout_s=_GRAPHS_S,
        )

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return tensor_over(address, nbytes, self._device)

    def close(self) -> None:
        self._lease.detach()


def open_memory(load: engine_pb2.Load, options: Options, ranks: Ranks) -> ModelMemory:
    """Opens the memory of the model of `load` on this rank's device. Raises NoMemory."""
    return ModelMemory(LeaseDriver(load, options), ranks)
