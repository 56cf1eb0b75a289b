"""What differs between host and GPU outside SGLang: what a process holds beside its leases, and when the device is
done."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from balloond.driver import private

_CONTEXT_BYTES = 700 << 20
"""Of a CUDA context with the kernels of SGLang and FlashAttention, where the driver does not say it by process."""


def private_bytes(device: torch.device, elastic_bytes: int) -> int:
    """Bytes of the device that this process holds beside `elastic_bytes` of extents."""
    if device.type == "cuda":
        return sum(kept(device).values())
    with open("/proc/self/statm") as statm:
        return max(0, int(statm.read().split()[1]) * 4096 - elastic_bytes)


def kept(device: torch.device) -> dict[str, int]:
    """Bytes of a GPU that this process holds beside its extents, by kind: `driver` is what the driver counts and torch
    does not (the context, loaded kernels, libraries' own memory), `in_use` and `spare` are torch's."""
    reserved, in_use = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    counted = private.counted(f"cuda:{device.index or 0}")
    driver = counted - reserved if counted > reserved else _CONTEXT_BYTES
    return {"driver": driver, "in_use": in_use, "spare": reserved - in_use}


def put(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """These (int64) on the device. Out of pinned memory, because the host waits for a copy out of any other."""
    on_host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def finish(device: torch.device) -> None:
    """Waits for the device and returns what its allocator only keeps for later: memory is about to leave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
