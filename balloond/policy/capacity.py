"""The bytes of a device that balloond may give out, and whether it can manage the device at all. Pure: what the device
and the machine report is an argument. Every refusal is one line that names the device and has the numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.errors import Refused, Unmet

KV_EXTENT = 8 << 20
"""Bytes of an extent of KV on a GPU, unless a setting names another size."""
LARGEST_KV_EXTENT = 64 << 20
"""Bytes of the largest extent of KV that is chosen for want of descriptors. A model's floor is whole extents, so larger
ones would take memory for nothing."""
_OTHER_DESCRIPTORS = 256
"""Descriptors beyond those of extents: sockets, logs, and extents on their way."""


@dataclass(frozen=True)
class DeviceHardware:
    """Properties and free memory of one GPU, in bytes, when it was looked at."""

    model: str
    driver: str
    total_bytes: int
    free_bytes: int
    page_bytes: int
    """Bytes of the smallest page that it maps."""
    shares_memory: bool
    """True if the GPU can map memory whose descriptor came from another process."""
    partitioned: bool
    """Whether MIG is on."""
    processes: tuple[tuple[int, int], ...] = ()
    """(pid, bytes) of processes that hold memory of it, as far as they can be seen."""


def check(device: str, hardware: DeviceHardware, page_bytes: int) -> None:
    """Raises Unmet when this device cannot be managed."""
    if hardware.partitioned:
        raise Unmet(f"{device} ({hardware.model}) is partitioned: MIG has to be off")
    if not hardware.shares_memory:
        raise Unmet(
            f"{device} ({hardware.model}) with driver {hardware.driver} cannot hand memory over as file descriptors "
            "(CUDA's virtual memory management): a newer driver, or Linux without a hypervisor that hides it, is needed"
        )
    if page_bytes % hardware.page_bytes:
        raise Unmet(f"{device} ({hardware.model}) maps pages of {hardware.page_bytes} bytes, not of {page_bytes}")


def fresh(device: str, hardware: DeviceHardware, wanted_bytes: int | None, reserve_bytes: int, page_bytes: int) -> int:
    """Capacity in bytes of a device of which nothing is given out yet: what was configured, or else what is free less
    the reserve, in whole pages. Raises Refused when that much is not free."""
    free = hardware.free_bytes
    others = hardware.total_bytes - free
    told = f"{free} of {hardware.total_bytes} bytes are free, {others} taken{_by(hardware.processes)}"
    if wanted_bytes is not None:
        if wanted_bytes > free:
            raise Refused(f"{device}: capacity_bytes is {wanted_bytes}, but {told}")
        return wanted_bytes
    capacity = (free - reserve_bytes) // page_bytes * page_bytes
    if capacity <= 0:
        raise Refused(f"{device}: nothing is left to give out: {told}; reserve_bytes is {reserve_bytes}")
    return capacity


def _by(processes: tuple[tuple[int, int], ...]) -> str:
    largest = sorted(processes, key=lambda process: -process[1])[:3]
    return f" (process {', '.join(f'{pid}: {nbytes}' for pid, nbytes in largest)})" if largest else ""


def given_out(device: str, capacity_bytes: int, set_aside_bytes: int) -> int:
    """Bytes of the capacity that the ledger gives out. Raises Refused when the spares take all of it."""
    if capacity_bytes <= set_aside_bytes:
        raise Refused(f"{device}: its capacity of {capacity_bytes} bytes is less than the {set_aside_bytes} of spares")
    return capacity_bytes - set_aside_bytes


def most_extents(limit: int) -> int:
    """Number of extents of which a process that may open `limit` descriptors can hold one descriptor each."""
    return max(0, limit - _OTHER_DESCRIPTORS)


def descriptors(devices: Iterable[tuple[int, int]]) -> int:
    """Number of descriptors of a process that holds one for each extent, when all of its devices are given out in
    extents of KV. Memory that is free has none. `devices`: (capacity, extent of KV), in bytes."""
    return _OTHER_DESCRIPTORS + sum(-(-capacity // extent) for capacity, extent in devices)


def fitting(devices: Sequence[tuple[int, int]], limit: int) -> int | None:
    """Bytes of the smallest extent of KV for all of these devices, (capacity, extent of KV) each, with which a process
    that may open `limit` descriptors holds all of their extents: the smallest that they have, doubled as often as it
    has to be. None if it would be larger than `LARGEST_KV_EXTENT`."""
    size = min(extent for _, extent in devices)
    while descriptors((capacity, size) for capacity, _ in devices) > limit:
        size *= 2
        if size > LARGEST_KV_EXTENT:
            return None
    return size


def check_descriptors(process: str, devices: Sequence[tuple[int, int]], limit: int) -> None:
    """Raises Refused when a process of this name may not open as many descriptors as its devices, (capacity, extent of
    KV) each, can have extents."""
    needed = descriptors(devices)
    if needed <= limit:
        return
    sizes = " and ".join(str(size) for size in sorted({extent for _, extent in devices}))
    larger = fitting(devices, limit)
    raise Refused(
        f"{process} may open {limit} descriptors, and {needed} are needed for the extents of its devices, which are of "
        f"{sizes} bytes; raise its limit to that (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)"
        + (f", or give kv_extent_bytes of balloond, the loader and engines {larger}" if larger else "")
    )
