"""Reads the tensors of safetensors files, in the files' order, with several threads ahead of the consumer.

Files are read in pieces, straight to their tensor's place in a buffer that the device copies from. A tensor that does
not fit there (it is larger than the buffer, or the consumer keeps those before it) gets ordinary memory of its own, one
tensor at a time and not ahead. So reading holds the buffer, at most one tensor beside it, and the tensors that the
consumer keeps. The bytes go through the page cache: a folder that was just downloaded is there.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open

from gpu_scheduler.engines.sglang.memory.host_buffer import Bytes, HostBuffer
from services.telemetry import log

Tensors = Iterator[tuple[str, torch.Tensor]]
_log = log.get(__name__)
PIECE_BYTES = 8 << 20
"""Bytes of one read; a large tensor is read by all threads at once."""
_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16, "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16,
    "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


class OtherTypes(Exception):
    """A file has tensors of types that only safetensors itself knows how to make."""


@dataclass(eq=False)
class TensorRead:
    """One tensor of a file, and the memory that it is read into. It begins at byte `at` of the file."""

    name: str
    file: str
    fd: int
    at: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    memory: Bytes | None = None
    missing: int = 0
    """Number of pieces that have not been read."""

    def take(self) -> torch.Tensor:
        """The tensor, which from now on is the only holder of its memory."""
        memory, self.memory = self.memory, None
        if memory is None:  # it has no bytes
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_numpy(memory).view(self.dtype).view(self.shape)


class ReadAhead:
    """Reads one list of files after the other, with `threads` threads, into `buffer`."""

    def __init__(self, buffer: HostBuffer, threads: int) -> None:
        self._buffer = buffer
        self._threads = threads
        self.nbytes = 0
        """Bytes read and handed over."""
        self.waited_s = 0.0
        """Seconds that the consumer has waited for tensors."""
        self._under_way = ExitStack()

    def tensors(self, files: Sequence[str]) -> Tensors:
        """Name and tensor of everything in these files. A tensor's memory is used again when nothing refers to it.
        Ending the iterator ends the reading. Raises OtherTypes before the first tensor, SafetensorError for a file that
        is none or not whole, OSError for one that changes meanwhile."""
        with ExitStack() as stack:
            self._under_way = stack
            wanted = [each for file in files for each in _wanted(file, stack)]
            reading = _Reading(wanted, self._buffer)
            for number in range(self._threads):
                thread = threading.Thread(target=reading.work, name=f"read {number}", daemon=True)
                thread.start()
                stack.callback(thread.join)
            stack.callback(reading.stop)  # before they are joined
            for each in wanted:
                began = time.monotonic()
                reading.wait_for(each)
                self._buffer.ready()
                self.waited_s += time.monotonic() - began
                self.nbytes += each.nbytes
                yield each.name, each.take()

    def close(self) -> None:
        """Ends the reading, if the consumer did not come to its end, and closes the buffer."""
        self._under_way.close()
        self._buffer.close()


class _Reading:
    """The state that the threads share. The consumer gives tensors their places, in order; the threads fill those that
    have one."""

    def __init__(self, wanted: Sequence[TensorRead], buffer: HostBuffer) -> None:
        self._buffer = buffer
        self._unplaced = deque(each for each in wanted if each.nbytes)
        self._pieces: deque[tuple[TensorRead, int, int]] = deque()
        """(tensor, start, end): byte ranges within a tensor that no thread reads yet."""
        self._failure: Exception | None = None
        self._stopped = False
        self._changed = threading.Condition()

    def wait_for(self, tensor: TensorRead) -> None:
        """Waits until `tensor`, the next one, has been read, and gives places to as many of the next ones as fit.
        Raises what a thread raised."""
        with self._changed:
            while self._unplaced and (place := self._buffer.take(self._unplaced[0].nbytes)) is not None:
                self._place(self._unplaced.popleft(), place)
            if self._unplaced and self._unplaced[0] is tensor:
                self._place(self._unplaced.popleft(), np.empty(tensor.nbytes, dtype=np.uint8))
            self._changed.notify_all()
            self._changed.wait_for(lambda: not tensor.missing or self._failure is not None)
            if self._failure is not None:
                raise self._failure

    def _place(self, tensor: TensorRead, memory: Bytes) -> None:
        tensor.memory = memory
        starts = range(0, tensor.nbytes, PIECE_BYTES)
        tensor.missing = len(starts)
        self._pieces.extend((tensor, start, min(start + PIECE_BYTES, tensor.nbytes)) for start in starts)

    def stop(self) -> None:
        """Makes the threads end after the piece that each is reading."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def work(self) -> None:
        """Reads pieces until the reading is stopped; each thread runs this."""
        while (piece := self._next()) is not None:
            tensor, start, end = piece
            failure = None
            try:
                _read(tensor, start, end)
            except Exception as error:
                failure = error
            with self._changed:
                tensor.missing -= 1
                self._failure = self._failure or failure
                if failure is not None or not tensor.missing:
                    self._changed.notify_all()

    def _next(self) -> tuple[TensorRead, int, int] | None:
        """Waits for the next piece to read; None: the reading is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pieces) or self._stopped)
            return None if self._stopped else self._pieces.popleft()


def _wanted(file: str, stack: ExitStack) -> list[TensorRead]:
    """Tensors of a file, in the order of their bytes. The file stays open as long as `stack`. Raises OtherTypes or
    SafetensorError."""
    with safe_open(file, framework="pt") as whole:  # raises where the header is wrong or does not fit the file
        names = list(whole.offset_keys())
    opened = stack.enter_context(open(file, "rb"))
    length = int.from_bytes(opened.read(8), "little")
    header = json.loads(opened.read(length))
    found = []
    for name in names:
        dtype, (begin, end) = header[name]["dtype"], header[name]["data_offsets"]
        if dtype not in _TYPES:
            raise OtherTypes(f"{os.path.basename(file)}: {name} is {dtype}")
        shape = tuple(header[name]["shape"])
        found.append(TensorRead(name, file, opened.fileno(), 8 + length + begin, end - begin, _TYPES[dtype], shape))
    return found


def _read(tensor: TensorRead, start: int, end: int) -> None:
    """Reads bytes `start` to `end` of a tensor into its memory. Raises OSError if the file is too short."""
    assert tensor.memory is not None
    target = tensor.memory.data
    while start < end:
        done = os.preadv(tensor.fd, [target[start:end]], tensor.at + start)
        if not done:
            name = os.path.basename(tensor.file)
            raise OSError(
                f"{name} ends at byte {tensor.at + start}, within {tensor.name}: it was cut while it was read"
            )
        start += done


def or_as_ever(
    reader: ReadAhead | None, original: Callable[..., Tensors], files: Sequence[str], *args: object, **more: object
) -> Tensors:
    """Name and tensor of everything in these files, by `reader`, or by `original` where there is none or it cannot make
    them."""
    if reader is not None:
        try:
            yield from reader.tensors(files)
            return
        except OtherTypes as error:
            _log.info("files are read as they are needed", why=str(error))
    yield from original(files, *args, **more)
