"""What differs between host and GPU outside SGLang: what a process holds beside its leases, and when the device is
done."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

from balloond.driver import private
from services.telemetry import log

_log = log.get(__name__)
_CONTEXT_BYTES = 700 << 20
"""Of a CUDA context with the kernels of SGLang and FlashAttention, where the driver does not say it by process."""
_SMALL_STACK_BYTES = 128
_stack_bytes: dict[int, int] = {}
"""Bytes of stack that each device's threads had before it was lowered."""


class Graphs(Protocol):
    """Memory of CUDA graphs that leaves while the model sleeps (`memory/graph_memory.py`)."""

    @property
    def taken_bytes(self) -> int: ...

    @property
    def mapped_bytes(self) -> int: ...

    def live_bytes(self) -> int: ...


def private_bytes(device: torch.device, elastic_bytes: int, graphs: Graphs | None = None) -> int:
    """Bytes of the device that this process held at its most, since `forget_peak`, beside `elastic_bytes` of extents
    and what its graphs have."""
    if device.type == "cuda":
        in_graphs = graphs.taken_bytes if graphs is not None else 0
        return _driver_bytes(device, in_graphs) + torch.cuda.max_memory_reserved(device) - in_graphs
    with open("/proc/self/statm") as statm:
        return max(0, int(statm.read().split()[1]) * 4096 - elastic_bytes)


def kept(device: torch.device, graphs: Graphs | None = None) -> dict[str, int]:
    """Bytes of a GPU that this process holds now, by kind: `driver` is what the driver counts and torch does not (the
    context, loaded kernels, libraries' own memory), `in_use` and `spare` are torch's. `graphs` is what is mapped for
    CUDA graphs: leased, not the process's own."""
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
    """Of what is `kept`, what is leased from nobody."""
    return sum(nbytes for kind, nbytes in kinds.items() if kind != "graphs")


def _driver_bytes(device: torch.device, in_graphs: int) -> int:
    reserved = torch.cuda.memory_reserved(device) - in_graphs
    counted = private.counted(f"cuda:{device.index or 0}")
    return counted - reserved if counted > reserved else _CONTEXT_BYTES


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allow(device: torch.device, nbytes: int | None) -> None:
    """From now on torch takes no more than `nbytes` of the device, ranges of ours that it uses included: it raises
    OutOfMemoryError. None: whatever there is."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)


def lower_stack(device: torch.device) -> None:
    """A context keeps the stack of all threads that the device could run: 232 MiB on an H200. Nothing may run until
    `restore_stack`."""
    if device.type != "cuda" or (device.index or 0) in _stack_bytes:
        return
    before = _set_stack(_SMALL_STACK_BYTES)
    if before is not None:
        _stack_bytes[device.index or 0] = before


def restore_stack(device: torch.device) -> None:
    before = _stack_bytes.get(device.index or 0) if device.type == "cuda" else None
    if before is not None and _set_stack(before) is not None:
        del _stack_bytes[device.index or 0]


def _set_stack(nbytes: int) -> int | None:
    """Of torch's context; what it was, or None where the driver refuses: kernels that need more get it as they are
    launched."""
    began = time.monotonic()
    try:
        before = private.set_stack(nbytes)
    except OSError as error:
        _log.warning("stack of the device not changed", bytes=nbytes, why=str(error))
        return None
    _log.info("stack of the device", bytes=nbytes, before=before, ms=round(1e3 * (time.monotonic() - began), 2))
    return before


def reads(device: torch.device, others: Sequence[str]) -> bool:
    """Whether kernels here can read the memory of the other devices."""
    if device.type != "cuda":
        return True
    torch.cuda.set_device(device)
    peers = {torch.device(other).index or 0 for other in others} - {device.index or 0}
    return all(torch.cuda.can_device_access_peer(device, peer) for peer in peers)


def put(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """These (int64) on the device. Out of pinned memory, because the host waits for a copy out of any other."""
    on_host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def finish(device: torch.device) -> None:
    """Waits for the device and returns what its allocator only keeps for later: memory is about to leave."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
