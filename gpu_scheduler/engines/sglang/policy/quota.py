"""What is booked for a process beside its leases. Pure."""

from __future__ import annotations

from gpu_scheduler.engines.sglang.base.errors import NoMemory

SPARE_BYTES = 128 << 20
"""Booked beyond what was measured: batches of other sizes leave holes in what torch keeps for later."""

DRIVER_GROWS_BYTES = 64 << 20
"""Of a quota, not for torch: kernels that are first used later are loaded later."""


def booked(model: str, peak_bytes: int, stated_bytes: int) -> int:
    """For a process that took `peak_bytes` at its most: what the catalogue states, or, where it states nothing (0), as
    much as was taken and some more. Raises NoMemory when less is stated than was taken."""
    if stated_bytes and peak_bytes > stated_bytes:
        raise NoMemory(
            f"{model} needs {gib(peak_bytes)} of its device beside weights and KV, its quota is {gib(stated_bytes)}: "
            "raise quota_bytes"
        )
    return stated_bytes or peak_bytes + SPARE_BYTES


def left_to_torch(quota_bytes: int, peak_bytes: int, driver_bytes: int) -> int:
    """Of a quota, where the driver has `driver_bytes` of what the process took: never less than torch took itself."""
    return max(peak_bytes, quota_bytes - DRIVER_GROWS_BYTES) - driver_bytes


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
