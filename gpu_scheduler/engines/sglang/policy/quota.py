"""The quota: device memory booked for a process beside its leases. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_scheduler.engines.sglang.base.errors import NoMemory

SPARE_BYTES = 128 << 20
"""Bytes booked beyond the measured peak: batches of other sizes leave holes in the memory that torch keeps for
later."""

DRIVER_GROWS_BYTES = 64 << 20
"""Bytes of a quota that torch may not use: kernels that are first used later are loaded later."""

_SLOT_BYTES = 8
"""Bytes of the number of a token's slot."""


def prefix_bytes(device_bytes: int, token_bytes: Sequence[int]) -> int:
    """Most bytes that SGLang's tree of cached prefixes takes beside the KV itself: it keeps the slots of all cached
    tokens on the device. `token_bytes`: bytes of KV of a token, for each kind of KV that has slots for tokens."""
    return _SLOT_BYTES * (device_bytes // min(token_bytes))


def booked(model: str, peak_bytes: int, stated_bytes: int, prefix_bytes: int) -> int:
    """Bytes to book for a process that took at most `peak_bytes` while hardly a prefix was cached: the catalogue's
    `stated_bytes`, or, where that is 0, the peak plus `SPARE_BYTES` and `prefix_bytes`. Raises NoMemory when less is
    stated than was taken."""
    if stated_bytes and peak_bytes > stated_bytes:
        raise NoMemory(
            f"{model} needs {gib(peak_bytes)} of its device beside weights and KV, its quota is {gib(stated_bytes)}: "
            "raise quota_bytes"
        )
    return stated_bytes or peak_bytes + SPARE_BYTES + prefix_bytes


def left_to_torch(quota_bytes: int, peak_bytes: int, driver_bytes: int) -> int:
    """Bytes of a quota that torch may take, where `driver_bytes` of the process's memory are the driver's: never less
    than torch took itself at the peak."""
    return max(peak_bytes, quota_bytes - DRIVER_GROWS_BYTES) - driver_bytes


def gib(nbytes: int) -> str:
    """Bytes as text in GiB, with two decimals."""
    return f"{nbytes / 2**30:.2f} GiB"
