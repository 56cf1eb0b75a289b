"""Memory of CUDA graphs that leaves while a model sleeps: torch takes it from a range of ours, and a graph finds it at
the same addresses when it is replayed again.

Two of torch's pools lie over the range:
- `graphs` holds what capturing allocates. Blocks that are live when all graphs are captured may have to keep their
  values from replay to replay, so their contents wait in pinned host memory while the range is away.
- `scratch` holds what graphs write before it is read: the logits, the output of prefill steps, cuBLAS's workspace. It
  comes back as zeros. Inside `graphs` it could lie where a graph that was captured before has memory of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpu_scheduler.engines.sglang.base import collector
from gpu_scheduler.engines.sglang.base.errors import NoMemory
from gpu_scheduler.engines.sglang.memory.ranges import PieceRangeDriver
from gpu_scheduler.engines.sglang.policy.tensor_spans import joined
from services.telemetry import log

_log = log.get(__name__)
_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FIRST_BYTES = 256 << 20
"""Bytes mapped before the first capture, so that mapping rarely happens during one."""
AHEAD_BYTES = 64 << 20
"""Bytes mapped and free before each later capture."""


class GraphMemorySource:
    """The pair of C functions by which torch's allocator takes and returns memory of a range. The process has one, as
    torch may call them until it ends; the range is the current model's."""

    def __init__(self) -> None:
        self.pieces: PieceRangeDriver | None = None
        self._malloc, self._free = _MALLOC(self._take), _FREE(self._give)
        self.addresses = tuple(ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (self._malloc, self._free))

    def _take(self, nbytes: int, _device: int, _stream: int | None) -> int | None:
        """Address of `nbytes` of the range. None is NULL, on which torch raises OutOfMemoryError: an exception must not
        pass through its frames."""
        try:
            assert self.pieces is not None, "no model has a range for its graphs"
            return self.pieces.take(nbytes)
        except Exception as error:
            _log.warning("no memory for CUDA graphs", bytes=nbytes, why=str(error))
            return None

    def _give(self, address: int | None, _nbytes: int, _device: int, _stream: int | None) -> None:
        """Returns memory to the range. Memory of a range that is gone is ignored: its addresses are never used
        again."""
        try:
            if self.pieces is not None and address is not None:
                self.pieces.give(address)
        except Exception as error:
            _log.info("memory of CUDA graphs came back late", address=hex(address or 0), why=repr(error))


class GraphMemory:
    """The graph memory of one model. Between `captured` and `close` it may leave and come back any number of times."""

    def __init__(self, pieces: PieceRangeDriver, memory: torch.Tensor) -> None:
        """`memory`: a tensor of bytes over the whole range, mapped or not. Raises NoMemory if not even `FIRST_BYTES`
        are there."""
        self._pieces = pieces
        self._memory = memory
        self._device = memory.device
        self._live: list[tuple[int, int]] = []
        """(offset, bytes) of the blocks that keep their values."""
        self._saved: torch.Tensor | None = None
        self._away = False
        self.beside: Sequence[Any] = ()
        """Streams of the model's own, on which parts of graphs may be captured."""
        self.tables: list[torch.Tensor] = []
        """Tables of SGLang's attention that lie in scratch memory."""
        pieces.reserve(FIRST_BYTES)
        source, allocator = _source()
        source.pieces = pieces
        self._source = source
        self._graphs: Any = torch.cuda.MemPool(allocator)
        self._scratch: Any = torch.cuda.MemPool(allocator)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the range that are mapped."""
        return self._pieces.mapped_bytes

    @property
    def taken_bytes(self) -> int:
        """Bytes of the range that torch has taken; it counts them as its own, mapped or not."""
        return self._pieces.taken_bytes

    # --- capturing

    @contextmanager
    def capturing(self) -> Iterator[tuple[int, int]]:
        """Context in which all graphs are captured; yields the id of their pool. Raises RuntimeError if torch's account
        of the range is incomplete."""
        began = time.monotonic()
        try:
            # Torch calls us with its allocator's lock held, and that call then waits for the interpreter: no other
            # thread may free a tensor meanwhile, as the collector may.
            with collector.paused():
                yield self._graphs.id
        except BaseException:
            # A capture that failed has not told torch's allocator that it is over.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._graphs.id)
            raise
        torch.cuda.synchronize(self._device)
        self._pieces.trim()
        self._live = self._find_live()
        live, mapped = sum(size for _, size in self._live), self.mapped_bytes
        seconds = round(time.monotonic() - began, 3)
        _log.info("CUDA graphs captured", mapped=mapped, taken=self.taken_bytes, kept_values=live, seconds=seconds)

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Context whose allocations come back as zeros after the model slept."""
        with torch.cuda.use_mem_pool(self._scratch, self._device):
            yield

    def prepare_streams(self, streams: Sequence[Any]) -> None:
        """Makes cuBLAS and cuBLASLt take their workspaces for these streams now, on which the next graphs are captured.
        A workspace from before would be in ordinary memory, and lost while the model sleeps: graphs would write there
        all the same. Products with a bias are cuBLASLt's, which has workspaces of its own."""
        torch._C._cuda_clearCublasWorkspaces()
        for stream in streams:
            with torch.cuda.stream(stream), self.scratch():
                some = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
                torch.mm(some, some)
                torch.addmm(some[0], some, some)
            stream.synchronize()

    def ahead(self) -> None:
        """Maps memory ahead of a capture. If that is refused, the memory may not be needed."""
        with contextlib.suppress(NoMemory):
            self._pieces.reserve(AHEAD_BYTES)

    def _find_live(self) -> list[tuple[int, int]]:
        """(offset, bytes) of the blocks that keep their values. Raises RuntimeError if torch reports less than it
        took."""
        segments = self._segments()
        told = sum(segment["total_size"] for segment in segments)
        if told < self.taken_bytes:
            raise RuntimeError(f"torch tells of {told} bytes for CUDA graphs and took {self.taken_bytes}")
        return live(segments, self._pieces.address, self._scratch.id)

    def _segments(self) -> list[dict[str, Any]]:
        """Torch's segments in the range, as its memory snapshot has them."""
        start, span = self._pieces.address, self._memory.numel()
        return [each for each in torch.cuda.memory_snapshot() if start <= each["address"] < start + span]

    def live_bytes(self) -> int:
        """Bytes that torch counts as allocated in the range."""
        return sum(int(segment["allocated_size"]) for segment in self._segments())

    # --- sleeping

    def save(self) -> None:
        """Copies values to the host and returns workspaces to torch; called before the device is finished. Does nothing
        while the memory is away."""
        if self._away:
            return
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        if self._saved is None:
            total = sum(size for _, size in self._live)
            self._saved = torch.empty(total, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._copy(to_host=True)

    def leave(self) -> None:
        """Unmaps the memory; called after `save` and once the device is finished."""
        self._away = True
        self._pieces.leave()

    def come_back(self) -> None:
        """Maps the memory again and restores its values. Raises NoMemory, and then it is still away."""
        if self._away:
            self._pieces.come_back()
            self._away = False
            self._copy(to_host=False)
            torch.cuda.synchronize(self._device)

    def _copy(self, *, to_host: bool) -> None:
        assert self._saved is not None
        done = 0
        for offset, size in self._live:
            on_device, on_host = self._memory[offset : offset + size], self._saved[done : done + size]
            target, source = (on_host, on_device) if to_host else (on_device, on_host)
            target.copy_(source, non_blocking=True)
            done += size

    def close(self) -> bool:
        """Closes the range once the graphs are gone, and torch returns what it took. False if something still refers to
        part of it: that memory leaves all the same, but torch counts it from then on."""
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize(self._device)
        self._saved = None
        self.tables.clear()
        # Torch ends a process that drops a pool of which graphs are left.
        _undead.extend(pool for pool in (self._graphs, self._scratch) if pool.use_count() > 1)
        with collector.paused():
            self._graphs = self._scratch = None
            torch.cuda.empty_cache()
        if left := self.taken_bytes:
            _log.warning("memory of CUDA graphs is still referred to", bytes=left, tensors=self._tensors())
        self._source.pieces = None
        self._pieces.close()
        return not left

    def _tensors(self) -> list[str]:
        """Shapes and types of tensors and parameters in the range that Python's collector knows of."""
        start, span = self._pieces.address, self._memory.numel()
        kinds = (torch.Tensor, torch.nn.Parameter)
        tensors = [each for each in gc.get_objects() if type(each) in kinds and each.is_cuda]
        inside = [each for each in tensors if each is not self._memory and 0 <= each.data_ptr() - start < span]
        return [f"{tuple(each.shape)} {each.dtype}" for each in inside]


def live(segments: list[dict[str, Any]], start: int, scratch: tuple[int, int]) -> list[tuple[int, int]]:
    """(offset from `start`, bytes) of blocks in use in torch's segments, without those of the pool `scratch`. A segment
    whose pool torch does not name counts as well."""
    found = []
    for segment in segments:
        at = segment["address"] - start
        kept = tuple(segment.get("segment_pool_id", ())) != tuple(scratch)
        for block in segment["blocks"]:
            if kept and block["state"] != "inactive":
                found.append((at, at + block["size"]))
            at += block["size"]
    return [(start, end - start) for start, end in joined(found)]


_made: list[tuple[GraphMemorySource, Any]] = []
_undead: list[Any] = []


def _source() -> tuple[GraphMemorySource, Any]:
    """The process's memory source and torch's object for it. Torch calls it in the capture mode in which memory may be
    mapped."""
    if not _made:
        source = GraphMemorySource()
        _made.append((source, torch._C._cuda_customAllocator(*source.addresses)))
    return _made[0]
