"""Protocols of balloond's driver, as far as the engine uses it: the ranges of addresses, and the lease that makes
them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class KvAddresses(Protocol):
    """Addresses for one kind of KV (`kv_stretch.KvStretch`). Extents are named by their index in these addresses."""

    extent_bytes: int
    extents: NDArray[np.int64]
    """The first of the extents that are mapped as one and leave only together, for each index; (indices,)."""

    @property
    def refused(self) -> bool:
        """Whether balloond had nothing for the last request for memory. It may not have answered yet."""
        ...

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]:
        """Indices of at most `count` extents that are mapped and now the engine's. What the reserve lacks is requested
        from balloond, with a wait of at most `timeout_s` seconds; what comes later goes into the reserve and makes
        `wake_fd` readable. `instead_bytes`: bytes of its own prefixes that the engine could evict instead."""
        ...

    def take_tied(self) -> list[int]:
        """Takes extents in the reserve that are mapped as one with the engine's own and leave only with them; returns
        their indices."""
        ...

    def release(self, indices: Sequence[int]) -> None:
        """Returns extents that the engine has emptied; they leave once work given to the device before is done. Raises
        ValueError, with nothing changed, for one that is not the engine's."""
        ...

    def located(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """(extent id, byte offset in that extent) of each index; all must be mapped."""
        ...

    def headroom(self) -> int:
        """Number of further extents that the limit and the addresses allow; the device may still refuse them."""
        ...


class KvRange(Protocol):
    """The KV range (`balloond.driver.kv.range.ElasticRange`), as far as the engine uses it. The range has a stretch of
    addresses for each kind of KV; extents are named by their index in their stretch. Calls with a `stretch` are those
    of `KvAddresses`, for the stretch with that number."""

    address: int
    extent_bytes: int
    wake_fd: int
    cached_bytes: int
    """Bytes of prefixes that the engine could evict now; set by the engine."""

    @property
    def woken(self) -> bool:
        """Whether `wake_fd` is readable: a limit, memory or a reclaim has come."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped: owned, in reserve and quarantined."""
        ...

    def extents(self, stretch: int = 0) -> NDArray[np.int64]: ...

    def refused(self, stretch: int = 0) -> bool: ...

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0, stretch: int = 0) -> list[int]: ...

    def take_tied(self, stretch: int = 0) -> list[int]: ...

    def release(self, indices: Sequence[int], *, stretch: int = 0) -> None: ...

    def located(self, indices: Iterable[int], *, stretch: int = 0) -> list[tuple[int, int]]: ...

    def headroom(self, stretch: int = 0) -> int: ...

    def offset_bytes(self, stretch: int) -> int:
        """Bytes from `address` to a stretch."""
        ...

    def overage_bytes(self) -> int:
        """Bytes that must be given up to meet the limit, beside the reserve and what leaves already."""
        ...

    def take_reclaims(self) -> int:
        """Bytes that balloond wants back and the reserve does not cover, since the last call; clears `wake_fd`."""
        ...

    def reclaimed(self) -> None:
        """Reports that the engine has done what it could for the reclaims that it took."""
        ...

    def usage(self, used_bytes: int, cached: Sequence[tuple[float, int]]) -> None:
        """Reports the bytes of running requests, and (seconds since last use, bytes) of prefixes that no request runs
        on."""
        ...

    def empty(self) -> None:
        """Unmaps and returns everything, for hibernation; addresses and lease stay."""
        ...

    def lower(self, timeout_s: float) -> None:
        """Returns the reserve, so that the next extents have the lowest addresses; waits at most `timeout_s`
        seconds."""
        ...

    def close(self) -> None:
        """Unmaps and returns everything, and gives the addresses up."""
        ...


class OfferingRange(KvRange, Protocol):
    """A KV range for an engine of several ranks, which offers extents before it takes them."""

    def offer(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0, stretch: int = 0) -> list[int]:
        """Indices in the reserve, after what is missing of `count` was requested as in `acquire`. `take` has to
        follow."""
        ...

    def take(self, indices: Sequence[int], *, stretch: int = 0) -> None:
        """Ends an offer: these extents are the engine's now, the others stay in the reserve."""
        ...


class WeightsRangeDriver(Protocol):
    """The weights range (`balloond.driver.weights.WeightsRange`), as far as the engine uses it."""

    address: int

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, in whole pages."""
        ...

    def grow(self, total_bytes: int) -> None:
        """Maps the range up to `total_bytes`. Raises NoMemory."""
        ...

    def shrink(self, total_bytes: int) -> None:
        """Unmaps and returns the extents that begin behind `total_bytes`."""
        ...

    def leave(self) -> None:
        """Unmaps and returns all of it; the addresses stay reserved."""
        ...

    def close(self) -> None:
        """Ends the range."""
        ...


class PieceRangeDriver(Protocol):
    """A range that is handed out in pieces (`balloond.driver.pieces.PieceRange`), as far as the engine uses it. Methods
    that map raise NoMemory."""

    @property
    def address(self) -> int:
        """First address of the range."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped, in whole extents."""
        ...

    @property
    def taken_bytes(self) -> int:
        """Bytes in pieces that are handed out, mapped or not."""
        ...

    def reserve(self, nbytes: int) -> None:
        """Maps ahead, so that the next `nbytes` can be taken without mapping. Raises NoMemory."""
        ...

    def take(self, nbytes: int) -> int:
        """Address of a new piece of `nbytes`, in whole pages. Raises NoMemory."""
        ...

    def give(self, address: int) -> None:
        """Takes back a piece that is not used any more."""
        ...

    def trim(self) -> None:
        """Returns the extents in which no piece lies. The device must be done with them."""
        ...

    def leave(self) -> None:
        """Unmaps and returns everything; pieces stay handed out. The device must be done with them."""
        ...

    def come_back(self) -> None:
        """Maps again what left. Raises NoMemory."""
        ...

    def close(self) -> None:
        """Returns everything. Addresses of pieces that are still handed out stay reserved."""
        ...


class Driver(Protocol):
    """One lease with balloond, and the ranges that can be made on it."""

    weights_extent_bytes: int

    @property
    def lease_id(self) -> str:
        """balloond's name of the lease."""
        ...

    @property
    def limit_bytes(self) -> int:
        """Bytes of KV that the lease may hold now."""
        ...

    def kv_range(self, span_bytes: Sequence[int], *, alone: bool) -> OfferingRange:
        """Makes the KV range, with stretches of `span_bytes` of addresses. `alone`: no other rank has to have the same
        addresses mapped in the same way, so growth may be in large extents."""
        ...

    def weights_range(self, span_bytes: int) -> WeightsRangeDriver:
        """Makes the weights range, of `span_bytes` of addresses."""
        ...

    def piece_range(self, span_bytes: int) -> PieceRangeDriver:
        """Makes the range for CUDA graphs, of `span_bytes` of addresses."""
        ...

    def adapters_range(self, span_bytes: int) -> WeightsRangeDriver:
        """Makes the range for buffers of adapters, of `span_bytes` of addresses."""
        ...

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """A tensor of bytes over addresses that need not be mapped yet."""
        ...

    def close(self) -> None:
        """Ends the lease."""
        ...
