"""Moving bytes between images and extents, one file for each kind of device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loader.transfers.base import Transfer
from services.errors import Unavailable, Unmet

if TYPE_CHECKING:
    from loader.transfers.cuda import Pinned


class Transfers:
    """By device name. Made when they are first asked for: a kind's libraries are needed only where its devices are."""

    def __init__(self) -> None:
        self._made: dict[str, Transfer] = {}
        self._pinned: Pinned | None = None
        """Host memory is registered once for all GPUs."""

    def of(self, device: str) -> Transfer:
        """Raises Unmet for a device that nothing can be copied to, Unavailable without its libraries."""
        if device not in self._made:
            self._made[device] = self._make(device)
        return self._made[device]

    def _make(self, device: str) -> Transfer:
        kind, _, number = device.partition(":")
        if kind == "cuda":
            try:
                from loader.transfers.cuda import CudaTransfer, Pinned
            except ImportError as error:
                raise Unavailable(f"{device}: {error}") from None
            self._pinned = self._pinned or Pinned()
            return CudaTransfer(int(number), self._pinned)
        if kind == "cpu":
            from loader.transfers.cpu import CpuTransfer

            return CpuTransfer()
        raise Unmet(f"nothing can be copied to {device!r}")

    def forget(self, weights: memoryview) -> None:
        """An image is about to be unmapped; no copy of it is under way."""
        if self._pinned is not None:
            self._pinned.forget(weights)
