"""Copies for GPUs: extents are mapped here for the time of a copy, and copy engines move the bytes.

A GPU's link is a stream in its context: its copy engine reads host memory over its own way to the host. Extents are
mapped with access for the GPUs whose links still carry the copy, and each writes its part straight to where it belongs,
whichever GPU that is on. Everything is under way at once: while some chunks are copied, the extents of all that follow
are mapped (`mapped.py`) and the next part of the image is registered. A chunk is what Python decides about; the driver
gets it in smaller copies, because other users of a link, an engine that decodes for instance, are served between two of
them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends import cuda_hardware
from balloond.backends.cuda import PAGE_BYTES, Context, CudaMaker, CudaMapper, access, call
from loader.metrics import CONTEXT
from loader.policy.chunks import Chunk, Pair
from loader.transfers.base import Borrowed, Busy, Tidy, nobody, nothing
from loader.transfers.lanes import Carrying, Lanes, Move
from loader.transfers.mapped import Mapped
from loader.transfers.pinned import Pinned, pieces
from services.errors import Unmet
from services.telemetry import log

_log = log.get(__name__)

_WINDOW_BYTES = 96 << 20
"""Bytes given to a link and not done: one chunk that moves and two that wait, so that a link is never without work
while its thread takes the next, and a cancelled copy ends within some thousandths of a second."""
_WINDOW_BETWEEN_BYTES = 192 << 20
"""Bytes given to a link between two GPUs and not done. It is several times as fast, so they last half as long: twice as
many extents are mapped meanwhile, and each waits for what is under way."""
_COPY_BYTES = 8 << 20
"""Bytes of the largest single copy over a link: 0.2 ms."""
_COPY_BETWEEN_BYTES = 32 << 20
"""Bytes of the largest single copy between two GPUs."""
_FIRST_BETWEEN = 16
"""Extents of each side that are mapped before the first is copied from or to. Between GPUs bytes pass as fast as
extents are mapped beside them, at about 0.7 ms for 256 MiB; while nothing is copied, one takes 0.1 ms."""
_QUIET_WAIT = cu.CUevent_flags.CU_EVENT_BLOCKING_SYNC | cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
_NATIVE = cu.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class Gpus:
    """All GPUs; see TransferKind. It has what their copies share: registered memory, the threads of the links, the
    contexts."""

    def __init__(self, busy: Busy = nobody) -> None:
        self.pinned = Pinned()
        self.lanes = Lanes(lambda link: _Lane(self.gpu(_index(link))), _WINDOW_BYTES, busy)
        self.between = Lanes(lambda link: _Lane(self.gpu(_index(link.partition(">")[0]))), _WINDOW_BETWEEN_BYTES)
        """Lanes between GPUs. A link's name is that of its source and its target; the source's copy engine writes."""
        self._gpus: dict[int, _Gpu] = {}
        self._reached: set[int] = set()
        self._lock = threading.Lock()
        self._reaching = threading.Lock()

    def gpu(self, index: int) -> _Gpu:
        with self._lock:
            if index not in self._gpus:
                self._gpus[index] = _Gpu(index)
            return self._gpus[index]

    def keep_reached(self, index: int) -> None:
        """Keeps a page of the GPU's memory mapped for all GPUs that reach it, for as long as this process lives.
        Without that, the first extents of a copy to which other GPUs have access take 1.4 ms more for each such GPU, in
        which nothing moves. Does nothing before something was copied to the GPU itself: a context would have to be
        made."""
        gpu = self.gpu(index)
        with self._reaching:
            if index in self._reached or not gpu.opened:
                return
            mapper = gpu.mapper
            try:
                accesses = [access(other) for other in range(call(cu.cuDeviceGetCount)) if can_access(other, index)]
                fd = CudaMaker(index).create(PAGE_BYTES)
                try:
                    mapper.map(mapper.reserve(PAGE_BYTES), fd, PAGE_BYTES, accesses)
                    self._reached.add(index)
                finally:
                    os.close(fd)
            except OSError as error:  # the device is full: its copies begin a little later
                _log.warning("no page of a device stays mapped for its peers", device=index, why=str(error))

    def reaching(self, device: str, others: Sequence[str]) -> tuple[str, ...]:
        """The other GPUs that reach the device by NVLink: over PCIe the bytes would come to the device over the one
        link that is its own already. NVLink is told by its atomics, which it alone has."""
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
    """Copies for one GPU; see Transfer. Several may run at a time, each in a thread of its own."""

    def __init__(self, index: int, links: Sequence[str], gpus: Gpus) -> None:
        self._index = index
        self._links = links
        self._gpus = gpus
        self._gpu = gpus.gpu(index)

    def out_of(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        def read(device: int, host: int, nbytes: int, stream: Any) -> None:
            call(cu.cuMemcpyAsync, host, device, nbytes, stream)

        return self._copy(extents, image, plan, done, read)

    def into(
        self, extents: Sequence[Borrowed], image: memoryview, plan: Sequence[Chunk], done: Callable[[Chunk], None]
    ) -> Tidy:
        def write(device: int, host: int, nbytes: int, stream: Any) -> None:
            call(cu.cuMemcpyAsync, device, host, nbytes, stream)

        return self._copy(extents, image, plan, done, write)

    def between(
        self,
        sources: Sequence[Borrowed],
        targets: Sequence[Borrowed],
        plan: Sequence[Pair],
        done: Callable[[Pair], None],
    ) -> Tidy:
        if not plan:
            return nothing
        device, other = sources[0].device, targets[0].device
        if not (other.startswith("cuda:") and can_access(self._index, _index(other))):
            raise Unmet(f"there is no way from {device} to {other}")
        self._gpu.enter()
        mapper, alone = self._gpu.mapper, [access(self._index)]
        self._gpus.keep_reached(_index(other))

        def map(address: int, fd: int, nbytes: int) -> None:
            # No context of the other GPU is needed, and no access of it: this one's engine writes there.
            mapper.map(address, fd, nbytes, alone)

        with ExitStack() as stack:
            here = stack.enter_context(Mapped(mapper, sources))
            there = stack.enter_context(Mapped(mapper, targets))

            def opened(carrying: Carrying) -> None:
                here.start(map, _FIRST_BETWEEN)
                there.start(map, _FIRST_BETWEEN)

            def prepare(pair: Pair) -> None:
                here.reach(pair.source)
                there.reach(pair.target)

            def move(pair: Pair, stream: Any) -> None:
                target, source = there.at(pair.target), here.at(pair.source)
                for at in range(0, pair.nbytes, _COPY_BETWEEN_BYTES):
                    nbytes = min(_COPY_BETWEEN_BYTES, pair.nbytes - at)
                    call(cu.cuMemcpyDtoDAsync, target + at, source + at, nbytes, stream)

            links = [f"{device}>{other}"]
            self._gpus.between.carry(links, plan, opened=opened, prepare=prepare, move=move, done=done)
            return stack.pop_all().close

    def _copy(
        self,
        extents: Sequence[Borrowed],
        weights: memoryview,
        plan: Sequence[Chunk],
        done: Callable[[Chunk], None],
        move: Callable[[int, int, int, Any], None],
    ) -> Tidy:
        """Copies between extents and an image over the device's links. `move` takes an address of the device, one of
        the host, bytes and a stream."""
        if not plan:
            return nothing
        self._gpu.enter()
        mapper = self._gpu.mapper
        if len(self._links) > 1:
            self._gpus.keep_reached(self._index)
        image = self._gpus.pinned.of(weights, self._gpu.context)
        with ExitStack() as stack:
            there = stack.enter_context(Mapped(mapper, extents))

            def opened(carrying: Carrying) -> None:
                def map(address: int, fd: int, nbytes: int) -> None:
                    # No link joins a copy later, so these are all that may still write to the extent.
                    indices = {self._index, *(_index(link) for link in carrying())}
                    mapper.map(address, fd, nbytes, [access(index) for index in sorted(indices)])

                there.start(map)

            def prepare(chunk: Chunk) -> None:
                there.reach(chunk)
                image.reach(chunk.at + chunk.nbytes)

            def begin(chunk: Chunk, stream: Any) -> None:
                device = there.at(chunk) - chunk.at
                for at, nbytes in pieces(chunk.at, chunk.nbytes, _COPY_BYTES):
                    move(device + at, image.address + at, nbytes, stream)

            self._gpus.lanes.carry(self._links, plan, opened=opened, prepare=prepare, move=begin, done=done)
            return stack.pop_all().close


class _Gpu:
    """One device and its context in this process."""

    def __init__(self, index: int) -> None:
        self.context = Context(index)
        self.mapper = CudaMapper(index)
        self._index = index
        self._opening = threading.Lock()
        self.opened = False

    def enter(self) -> None:
        """Makes the context the calling thread's. The first copy makes it, and what it takes of the device becomes a
        metric."""
        with self._opening:
            if not self.opened:
                before = cuda_hardware.look(self._index).free_bytes
                self.context.enter()
                after = cuda_hardware.look(self._index).free_bytes
                CONTEXT.labels(f"cuda:{self._index}").set(max(0, before - after))
                self.opened = True
        self.context.enter()


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
        # This fails where the device has failed: then it does nothing more.
        call(cu.cuEventSynchronize, event)

    def close(self) -> None:
        for event in self._free:
            call(cu.cuEventDestroy, event)
        call(cu.cuStreamDestroy, self._stream)


def _index(device: str) -> int:
    return int(device.partition(":")[2])
