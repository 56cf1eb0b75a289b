"""Differences between host and GPU outside SGLang: the memory that a process holds beside its leases, and waiting for
the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from balloond.driver import private
from services.telemetry import log

_log = log.get(__name__)
_CONTEXT_BYTES = 700 << 20
"""Estimated bytes of a CUDA context with the kernels of SGLang and FlashAttention, for where the driver does not report
memory by process."""
_SMALL_STACK_BYTES = 128
_stack_bytes: dict[int, int] = {}
"""Stack bytes per thread of each device, by device index, from before `lower_stack`; absent where it is not lowered."""


class Graphs(Protocol):
    """Memory of CUDA graphs that leaves while the model sleeps (`memory/graph_memory.py`)."""

    @property
    def taken_bytes(self) -> int:
        """Bytes of the range that torch has taken, mapped or not."""
        ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped now."""
        ...

    def live_bytes(self) -> int:
        """Bytes that torch counts as allocated in the range."""
        ...


def private_bytes(device: torch.device, elastic_bytes: int, graphs: Graphs | None = None) -> int:
    """Most bytes of the device that this process has held since `forget_peak`, without `elastic_bytes` of extents and
    without the memory of its CUDA graphs. On a CPU it is the resident memory now."""
    if device.type == "cuda":
        in_graphs = graphs.taken_bytes if graphs is not None else 0
        return _driver_bytes(device, in_graphs) + torch.cuda.max_memory_reserved(device) - in_graphs
    with open("/proc/self/statm") as statm:
        return max(0, int(statm.read().split()[1]) * 4096 - elastic_bytes)


def kept(device: torch.device, graphs: Graphs | None = None) -> dict[str, int]:
    """Bytes of a GPU that this process holds now, by kind. `driver` is what the driver counts and torch does not (the
    context, loaded kernels, libraries' own memory), `in_use` and `spare` are torch's. `graphs` is mapped for CUDA
    graphs: leased, not the process's own."""
    in_graphs, live_in_graphs = (graphs.taken_bytes, graphs.live_bytes()) if graphs is not None else (0, 0)
    reserved = torch.cuda.memory_reserved(device) - in_graphs
    in_use = torch.cuda.memory_allocated(device) - live_in_graphs
    return {
        "driver": _driver_bytes(device, in_graphs),
        "in_use": in_use,
        "spare": reserved - in_use,
        "graphs": graphs.mapped_bytes if graphs is not None else 0,
    }


def own(kinds: dict[str, int]) -> int:
    """Bytes among `kinds` (see `kept`) that belong to no lease."""
    return sum(nbytes for kind, nbytes in kinds.items() if kind != "graphs")


def _driver_bytes(device: torch.device, in_graphs: int) -> int:
    """Bytes that the driver counts for this process beyond torch's; an estimate where the driver does not say."""
    reserved = torch.cuda.memory_reserved(device) - in_graphs
    counted = private.counted(f"cuda:{device.index or 0}")
    return counted - reserved if counted > reserved else _CONTEXT_BYTES


def forget_peak(device: torch.device) -> None:
    """Restarts the peak that `private_bytes` reports; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allow(device: torch.device, nbytes: int | None) -> None:
    """Limits torch to `nbytes` of the device, which includes ranges of ours that it uses; beyond that it raises
    OutOfMemoryError. None removes the limit. Does nothing on a CPU."""
    if device.type == "cuda":
        fraction = 1.0 if nbytes is None else min(1.0, nbytes / total_bytes(device))
        torch.cuda.set_per_process_memory_fraction(fraction, device)


def total_bytes(device: torch.device) -> int:
    """Bytes of memory of a GPU."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def lower_stack(device: torch.device) -> None:
    """Lowers the device's stack per thread while the model sleeps: a CUDA context keeps the stack of all threads that
    the device could run, 232 MiB on an H200. No kernel may run until `restore_stack`."""
    if device.type != "cuda" or (device.index or 0) in _stack_bytes:
        return
    before = _set_stack(_SMALL_STACK_BYTES)
    if before is not None:
        _stack_bytes[device.index or 0] = before


def restore_stack(device: torch.device) -> None:
    """Sets the stack per thread back to what it was before `lower_stack`; does nothing if it was not lowered."""
    before = _stack_bytes.get(device.index or 0) if device.type == "cuda" else None
    if before is not None and _set_stack(before) is not None:
        del _stack_bytes[device.index or 0]


def _set_stack(nbytes: int) -> int | None:
    """Sets the stack bytes per thread of torch's context. Returns the bytes before, or None where the driver refuses:
    kernels that need more get it as they are launched."""
    began = time.monotonic()
    try:
        before = private.set_stack(nbytes)
    except OSError as error:
        _log.warning("stack of the device not changed", bytes=nbytes, why=str(error))
        return None
    _log.info("stack of the device", bytes=nbytes, before=before, ms=round(1e3 * (time.monotonic() - began), 2))
    return before


def reads(device: torch.device, others: Sequence[str]) -> bool:
    """Whether kernels on `device` can read the memory of all `others` (device names). True on a CPU."""
    if device.type != "cuda":
        return True
    torch.cuda.set_device(device)
    peers = {torch.device(other).index or 0 for other in others} - {device.index or 0}
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)


def put(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """A tensor of `numbers`, (n,) int64, on `device`. It is copied out of pinned memory, because the host waits for a
    copy out of any other."""
    on_host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def wait(device: torch.device) -> None:
    """Waits until the device has done all the work it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish(device: torch.device) -> None:
    """Waits for the device and returns to it the memory that torch's allocator keeps only for later use; called when
    memory is about to leave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
