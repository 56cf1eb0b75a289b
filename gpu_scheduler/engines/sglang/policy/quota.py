"""What is booked for a process beside its leases. Pure."""

from __future__ import annotations

from gpu_scheduler.engines.sglang.errors import NoMemory

SPARE_BYTES = 128 << 20
"""Booked beyond what was measured: batches of other sizes leave holes in what torch keeps for later."""


def booked(model: str, peak_bytes: int, stated_bytes: int) -> int:
    """For a process that took `peak_bytes` at its most: what the catalogue states, or, where it states nothing (0), as
    much as was taken and some more. Raises NoMemory when less is stated than was taken."""
    if stated_bytes and peak_bytes > stated_bytes:
        raise NoMemory(
            f"{model} needs {gib(peak_bytes)} of its device beside weights and KV, its quota is {gib(stated_bytes)}: "
            "raise quota_bytes"
        )
    return stated_bytes or peak_bytes + SPARE_BYTES


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
