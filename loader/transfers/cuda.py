"""Copies for GPUs: extents are mapped here for the time of a copy, and copy engines move the bytes.

A GPU's link is a stream in its context: its copy engine reads host memory over its own way to the host. Extents are
mapped with access for the GPUs whose links carry the copy, and each writes its part straight to where it belongs,
whichever GPU that is on. Everything is under way at once: while some chunks are copied, the extents of all that follow
are mapped (`mapped.py`) and the next part of the image is registered.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends import cuda_hardware
from balloond.backends.cuda import Context, CudaMapper, access, call
from loader.metrics import CONTEXT
from loader.policy.chunks import Chunk, Pair
from loader.transfers.base import Borrowed
from loader.transfers.lanes import Lanes, Move
from loader.transfers.mapped import Mapped
from loader.transfers.pinned import Pinned, pieces
from services.errors import Unmet

_WINDOW_BYTES = 64 << 20
"""Given to a link and not done: it is never without work, and a cancelled copy ends soon. Two links that end with one
of them still full differ by a thousandth of a second."""
_WINDOW_BETWEEN_BYTES = 256 << 20
"""The same between two GPUs, several times as fast."""
_QUIET_WAIT = cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC | cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
_NATIVE = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Gpus:
    """See Kind. What copies of all GPUs share: registered memory, the threads of the links, the contexts."""

    def __init__(self, busy: Callable[[], Mapping[str, float]] = dict) -> None:
        self.pinned = Pinned()
        self.lanes = Lanes(lambda link: _Lane(self.gpu(_index(link))), _WINDOW_BYTES, busy)
        self.between = Lanes(lambda link: _Lane(self.gpu(_index(link.partition(">")[0]))), _WINDOW_BETWEEN_BYTES)
        """A link's name is that of its source and its target; the source's copy engine writes."""
        self._gpus: dict[int, _Gpu] = {}
        self._lock = threading.Lock()

    def gpu(self, index: int) -> _Gpu:
        with self._lock:
            if index not in self._gpus:
                self._gpus[index] = _Gpu(index)
            return self._gpus[index]

    def reaching(self, device: str, others: Sequence[str]) -> tuple[str, ...]:
        """By NVLink, that is: over PCIe the bytes would come to the device over the one link that is its own already.
        NVLink alone has atomics."""
        call(cu.cuInit, 0)
        target = call(cu.cuDeviceGet, _index(device))
        return tuple(
            other
            for other in others
            if can_access(_index(other), _index(device))
            and call(cu.cuDeviceGetP2PAttribute, _NATIVE, call(cu.cuDeviceGet, _index(other)), target)
        )

    def transfer(self, device: str, links: Sequence[str]) -> CudaTransfer:
        return CudaTransfer(_index(device), links, self)

    def forget(self, weights: memoryview) -> None:
        self.pinned.forget(weights)


def can_access(index: int, other: int) -> bool:
    """Whether the first GPU reads and writes the other's memory."""
    call(cu.cuInit, 0)
    return index == other or bool(
        call(cu.cuDeviceCanAccessPeer, call(cu.cuDeviceGet, index), call(cu.cuDeviceGet, other))
    )


class CudaTransfer:
    """See Transfer. Several copies may run at a time, each in a thread of its own."""

    def __init__(self, index: int, links: Sequence[str], gpus: Gpus) -> None:
        self._index = index
        self._links = links
        self._gpus = gpus
        self._gpu = gpus.gpu(index)

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        def read(device: int, host: int, nbytes: int, stream: Any) -> None:
            call(cu.cuMemcpyAsync, host, device, nbytes, stream)

        self._copy(extents, image, plan, done, read)

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> None:
        def write(device: int, host: int, nbytes: int, stream: Any) -> None:
            call(cu.cuMemcpyAsync, device, host, nbytes, stream)

        self._copy(extents, image, plan, done, write)

    def between(
        self,
        sources: Sequence[Borrowed],
        targets: Sequence[Borrowed],
        plan: Sequence[Pair],
        done: Callable[[Pair], None],
    ) -> None:
        if not plan:
            return
        device, other = sources[0].device, targets[0].device
        if not (other.startswith("cuda:") and can_access(self._index, _index(other))):
            raise Unmet(f"there is no way from {device} to {other}")
        self._gpu.enter()
        # No context of the other GPU is needed: this one's engine writes there.
        mine = _Reached(self._gpu.mapper, [self._index])
        with (
            Mapped(mine, sources, (pair.source for pair in plan)) as here,
            Mapped(mine, targets, (pair.target for pair in plan)) as there,
        ):

            def prepare(pair: Pair) -> None:
                here.reach(pair.source)
                there.reach(pair.target)

            def move(pair: Pair, stream: Any) -> None:
                call(cu.cuMemcpyDtoDAsync, there.at(pair.target), here.at(pair.source), pair.nbytes, stream)

            def moved(pair: Pair) -> None:
                here.left(pair.source)
                there.left(pair.target)
                done(pair)

            self._gpus.between.carry([f"{device}>{other}"], plan, prepare=prepare, move=move, done=moved)

    def _copy(
        self,
        extents: Sequence[Borrowed],
        weights: memoryview,
        plan: Sequence[Chunk],
        done: Callable[[Chunk], None],
        move: Callable[[int, int, int, Any], None],
    ) -> None:
        """`move` takes an address of the device, one of the host, bytes and a stream."""
        if not plan:
            return
        self._gpu.enter()
        image = self._gpus.pinned.of(weights, self._gpu.context)
        with Mapped(_Reached(self._gpu.mapper, map(_index, self._links)), extents, plan) as there:

            def prepare(chunk: Chunk) -> None:
                there.reach(chunk)
                image.reach(chunk.at + chunk.nbytes)

            def begin(chunk: Chunk, stream: Any) -> None:
                device = there.at(chunk)
                for at, nbytes in pieces(chunk.at, chunk.nbytes):
                    move(device + at - chunk.at, image.address + at, nbytes, stream)

            def moved(chunk: Chunk) -> None:
                there.left(chunk)
                done(chunk)

            self._gpus.lanes.carry(self._links, plan, prepare=prepare, move=begin, done=moved)


class _Gpu:
    """One device and its context in this process."""

    def __init__(self, index: int) -> None:
        self.context = Context(index)
        self.mapper = CudaMapper(index)
        self._index = index
        self._opening = threading.Lock()
        self._opened = False

    def enter(self) -> None:
        """Makes the context the calling thread's. The first copy makes it, and what it takes of the device is told."""
        with self._opening:
            if not self._opened:
                before = cuda_hardware.look(self._index).free_bytes
                self.context.enter()
                after = cuda_hardware.look(self._index).free_bytes
                CONTEXT.labels(f"cuda:{self._index}").set(max(0, before - after))
                self._opened = True
        self.context.enter()


class _Reached:
    """A GPU's mapper that gives some GPUs access to what it maps, and no other."""

    def __init__(self, mapper: CudaMapper, indices: Iterable[int]) -> None:
        self._mapper = mapper
        self._access = [access(index) for index in indices]

    def reserve(self, span: int) -> int:
        return self._mapper.reserve(span)

    def release(self, address: int, span: int) -> None:
        self._mapper.release(address, span)

    def map(self, address: int, fd: int, nbytes: int) -> None:
        self._mapper.map(address, fd, nbytes, self._access)

    def unmap(self, address: int, nbytes: int) -> None:
        self._mapper.unmap(address, nbytes)


class _Lane:
    """A stream of a GPU, with an event behind each chunk."""

    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._stream: Any
        self._begun: deque[Any] = deque()
        self._free: list[Any] = []

    def open(self) -> None:
        self._gpu.enter()
        self._stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def begin(self, move: Move) -> None:
        event = self._free.pop() if self._free else call(cu.cuEventCreate, _QUIET_WAIT)
        self._begun.append(event)
        try:
            move(self._stream)
            call(cu.cuEventRecord, event, self._stream)
        except Exception:
            self._free.append(self._begun.pop())
            cu.cuStreamSynchronize(self._stream)  # a part of it may be under way
            raise

    def finish(self) -> None:
        event = self._begun.popleft()
        self._free.append(event)
        # Fails where the device has: then it does nothing more.
        call(cu.cuEventSynchronize, event)

    def close(self) -> None:
        for event in self._free:
            call(cu.cuEventDestroy, event)
        call(cu.cuStreamDestroy, self._stream)


def _index(device: str) -> int:
    return int(device.partition(":")[2])
