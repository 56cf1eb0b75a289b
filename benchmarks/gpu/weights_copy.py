"""Weights between host memory and a GPU, through the loader's own transfer, beside a plain pinned copy.

Question: how far from the link's speed is an image that goes into a lease's extents, and out of them; what does
registering its memory cost, what mapping the extents here, and what does the loader take of the device for itself?

    python -m benchmarks.gpu.weights_copy --out DIR --commit HASH
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends import look, maker, mapper
from balloond.backends.cuda import Context, call
from benchmarks.gpu import report
from loader.policy.chunks import Chunk, plan
from loader.transfers import Transfers
from loader.transfers.base import Borrowed

MIB = 1 << 20
EXTENT = 64 * MIB
CHUNK = 8 * MIB


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Reference:
    """Pinned host memory and a plain allocation of the device, copied in the chunks that the loader uses."""

    def __init__(self, context: Context, nbytes: int) -> None:
        context.enter()
        self._nbytes = nbytes
        self._host = int(call(cu.cuMemAllocHost, nbytes))
        ctypes.memset(self._host, 1, nbytes)
        self._device = int(call(cu.cuMemAlloc, nbytes))
        self._stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def into(self) -> None:
        for at in range(0, self._nbytes, CHUNK):
            call(cu.cuMemcpyHtoDAsync, self._device + at, self._host + at, CHUNK, self._stream)
        call(cu.cuStreamSynchronize, self._stream)

    def out_of(self) -> None:
        for at in range(0, self._nbytes, CHUNK):
            call(cu.cuMemcpyDtoHAsync, self._host + at, self._device + at, CHUNK, self._stream)
        call(cu.cuStreamSynchronize, self._stream)

    def close(self) -> None:
        call(cu.cuMemFree, self._device)
        call(cu.cuMemFreeHost, self._host)


@contextmanager
def image(nbytes: int) -> Iterator[memoryview]:
    """An image's memory, of which nothing was touched."""
    fd = os.memfd_create("image")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    view = memoryview(memory)
    try:
        yield view
    finally:
        view.release()
        memory.close()


def touch(view: memoryview, threads: int) -> None:
    """Has the kernel give every page, from several threads."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    part = view.nbytes // threads
    workers = [
        threading.Thread(target=ctypes.memset, args=(address + i * part, i, part))  # without the interpreter's lock
        for i in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def registering(context: Context, nbytes: int) -> list[dict[str, Any]]:
    """Seconds to register memory for CUDA: untouched, touched by one thread, by eight."""
    context.enter()
    rows = []
    for threads in (0, 1, 8):
        with image(nbytes) as view:
            touching = seconds(lambda: touch(view, threads)) if threads else 0.0  # noqa: B023
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            pieces = range(0, nbytes, 256 * MIB)
            register = seconds(
                lambda: [call(cu.cuMemHostRegister, address + at, 256 * MIB, 1) for at in pieces]  # noqa: B023
            )
            unregister = seconds(lambda: [call(cu.cuMemHostUnregister, address + at) for at in pieces])  # noqa: B023
        rows.append({"threads": threads, "touch_s": touching, "register_s": register, "unregister_s": unregister})
    return rows


def mapping(device: str, extents: list[Borrowed]) -> dict[str, float]:
    """Seconds to map all extents where an engine would, and to take them away."""
    one = mapper(device)
    span = sum(extent.nbytes for extent in extents)
    address = one.reserve(span)

    def map_all() -> None:
        at = address
        for extent in extents:
            one.map(at, extent.fd, extent.nbytes)
            at += extent.nbytes

    result = {"map_s": seconds(map_all), "unmap_s": seconds(lambda: one.unmap(address, span))}
    one.release(address, span)
    return result


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=8, help="of weights")
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    device = f"cuda:{arguments.device}"
    nbytes = arguments.gib << 30
    make = maker(device)
    creating: list[float] = []
    extents: list[Borrowed] = []
    for number in range(nbytes // EXTENT):
        began = time.perf_counter()
        extents.append(Borrowed(number, EXTENT, make.create(EXTENT), device))
        creating.append(time.perf_counter() - began)
    transfers = Transfers()
    transfer = transfers.of(device)
    steps = plan([extent.nbytes for extent in extents], nbytes, CHUNK)
    times: dict[str, list[float]] = {}

    def nothing(chunk: Chunk) -> None:
        pass

    free = look(device).free_bytes
    with image(nbytes) as view:
        # A new model's save; the first copy of all makes the loader's context as well.
        times["out of, image untouched"] = [seconds(lambda: transfer.out_of(extents, view, steps, nothing)())]
        context_bytes = free - look(device).free_bytes
        transfers.forget(view)
        times["into, after a restart"] = [seconds(lambda: transfer.into(extents, view, steps, nothing)())]
        times["into"] = [
            seconds(lambda: transfer.into(extents, view, steps, nothing)()) for _ in range(arguments.repeat)
        ]
        times["out of"] = [
            seconds(lambda: transfer.out_of(extents, view, steps, nothing)()) for _ in range(arguments.repeat)
        ]
        times["drop"] = [seconds(lambda: transfers.forget(view))]
    context = Context(arguments.device)
    reference = Reference(context, nbytes)
    for name, work in (("pinned into", reference.into), ("pinned out of", reference.out_of)):
        work()
        times[name] = [seconds(work) for _ in range(arguments.repeat)]
    reference.close()
    maps = [mapping(device, extents) for _ in range(arguments.repeat)]
    result = {
        "bytes": nbytes,
        "extent_bytes": EXTENT,
        "chunk_bytes": CHUNK,
        "seconds": times,
        "create_s": creating,
        "mapping": maps,
        "registering": registering(context, 4 << 30),
        "loader_context_bytes": context_bytes,
    }
    rows = [
        (name, report.quantile(each, 0.5), nbytes / report.quantile(each, 0.5) / 1e9, len(each))
        for name, each in times.items()
    ]
    report.table(f"{arguments.gib} GiB in extents of {EXTENT // MIB} MiB", ("copy", "s p50", "GB/s", "runs"), rows)
    report.table(
        "registering 4 GiB",
        ("threads that touched it", "touch s", "register s", "unregister s"),
        [(r["threads"], r["touch_s"], r["register_s"], r["unregister_s"]) for r in result["registering"]],
    )
    print(f"context of the loader: {context_bytes / MIB:.0f} MiB")
    for key in ("map_s", "unmap_s"):
        each = report.quantile([m[key] for m in maps], 0.5)
        print(f"{key[:-2]}: {1e3 * each:.1f} ms, {1e6 * each / len(extents):.0f} us an extent")
    print(f"create and export: {1e6 * report.quantile(creating, 0.5):.0f} us an extent")
    report.write(arguments.out, "gpu_weights_copy", arguments.commit, result)


if __name__ == "__main__":
    main()
