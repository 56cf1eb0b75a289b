"""The bytes of a device that balloond may give out, and whether it can manage the device at all. Pure: what the device
and the machine report is an argument. Every refusal is one line that names the device and has the numbers."""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import Refused, Unmet

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


def descriptors(capacity_bytes: int, extent_bytes: int) -> int:
    """Number of descriptors of a process that holds one for each extent of a device that is given out wholly."""
    return -(-capacity_bytes // extent_bytes)


def check_descriptors(who: str, needed: int, limit: int) -> None:
    """Raises Refused when a process may not open as many descriptors as its devices can have extents."""
    if needed + _OTHER_DESCRIPTORS > limit:
        raise Refused(
            f"{who} may open {limit} descriptors, and {needed + _OTHER_DESCRIPTORS} are needed for the extents of its "
            "devices; raise its limit (ulimit -Hn, LimitNOFILE=) or give kv_extent_bytes a larger size"
        )
