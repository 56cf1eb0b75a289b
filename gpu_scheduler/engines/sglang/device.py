"""What differs between host and GPU outside SGLang: what a process holds beside its leases, and when the device is
done."""

from __future__ import annotations

import torch

_CONTEXT_BYTES = 560 << 20
"""Of a CUDA context with the kernels of SGLang and FlashAttention; not everywhere does the driver say it by process."""


def private_bytes(device: torch.device, elastic_bytes: int) -> int:
    """Bytes of the device that this process holds beside `elastic_bytes` of extents."""
    if device.type == "cuda":
        return _CONTEXT_BYTES + torch.cuda.memory_reserved(device)
    with open("/proc/self/statm") as statm:
        return max(0, int(statm.read().split()[1]) * 4096 - elastic_bytes)


def finish(device: torch.device) -> None:
    """Waits for the device and returns what its allocator only keeps for later: memory is about to leave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
