"""How fast a model's weights reach a device, over one link and over several, and how fast they leave it.

    python benchmarks/load.py --device cpu:0 --links cpu:0,cpu:1 --shapes tiny       # anywhere, seconds
    python benchmarks/load.py --device cuda:0 --links 1,2,4 --shapes 1b,8b --out FILE
    python benchmarks/load.py --device cuda:0 --links 1 --between cuda:1 --shapes 8b --out FILE
    python benchmarks/load.py --group cuda:0,cuda:1,cuda:2,cuda:3 --shapes 70b/4 --out FILE

    into      image -> extents, by the loader's transfer: from the call until the last byte is there, with the extents
              mapped in it; "tidied" is until they are taken away again as well, which an engine does not wait for
    out of    extents -> image, the same way, without a checksum
    between   the device's extents -> another device's, with `--between`
    group     an image for each device of `--group` -> its extents, all at once, as a model of several ranks is loaded;
              every link may carry for every device, so each keeps to its own
    first     the first `into` of a transfer: on a GPU the contexts are made and the image is registered in it
    limit     in the same run, plainly: pinned host memory to ordinary device memory, over as many links at once, each
              to its own GPU; on the CPU as many threads that copy memory; between GPUs one peer copy

Links are numbers of devices, the measured one first and then those that count up from 0, or names, of which first one
is used, then two, and so on. Bytes are checked once for each number of links.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from balloond import backends
from benchmarks import _report
from loader.policy.chunks import pairs, plan
from loader.transfers import Transfers
from loader.transfers.base import Borrowed, Tidy
from services.runtime.checksum import checksum

MIB, GIB = 1 << 20, 1 << 30
SHAPES = {"tiny": 64 * MIB, "1b": 2_471_645_608, "3b": 6_425_499_648, "8b": 16_060_522_496, "70b/4": 35_276_726_272}
"""Bytes of Llama 3's weights of that size, in bfloat16; of the largest, those of one device in four."""
EXTENTS = {"cuda": (384 * MIB, 32 * MIB), "cpu": (8 * MIB, MIB)}
"""As engines ask for them: large ones as far as they go."""
LIMIT_BYTES = {"cuda": 2 * GIB, "cpu": 64 * MIB}
"""For each link."""


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def kind(device: str) -> str:
    return device.partition(":")[0]


@contextmanager
def extents(device: str, nbytes: int, large: int | None = None) -> Iterator[list[Borrowed]]:
    """What an engine would hold for so many bytes of weights; `large`: bytes of most of them, if others than usual."""
    usual, small = EXTENTS[kind(device)]
    large = large or usual
    sizes = [large] * (nbytes // large) + [small] * -(-(nbytes % large) // small)
    make = backends.maker(device)
    made = [Borrowed(number, size, make.create(size), device) for number, size in enumerate(sizes)]
    try:
        yield made
    finally:
        for extent in made:
            os.close(extent.fd)


@contextmanager
def image(nbytes: int) -> Iterator[memoryview]:
    """Host memory as the loader's images have it, with something in it."""
    fd = os.memfd_create("image")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    view = memoryview(memory)
    fill(view)
    yield view
    view.release()
    memory.close()


def fill(view: memoryview) -> None:
    """Rows that differ from each other, as the checksum wants them."""
    block = os.urandom(MIB - 4096)
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))

    def copy(at: int) -> None:
        ctypes.memmove(start + at, block, min(len(block), view.nbytes - at))

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(copy, range(0, view.nbytes, len(block))))


def together(works: Sequence[Callable[[], object]]) -> float:
    """Seconds until all are done, each in a thread."""
    threads = [threading.Thread(target=work) for work in works]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return seconds(run)


# --- the limits


def limit(links: Sequence[str], direction: str, repeat: int) -> float:
    """Bytes per second, the best of some runs."""
    nbytes = LIMIT_BYTES[kind(links[0])]
    if kind(links[0]) == "cuda":
        from balloond.backends.cuda import Context
        from benchmarks.gpu.weights_copy import Reference

        contexts = [Context(int(link.partition(":")[2])) for link in links]
        references = [Reference(context, nbytes) for context in contexts]

        def work(context: Context, reference: Reference) -> None:
            context.enter()
            (reference.into if direction == "into" else reference.out_of)()

        works = [
            lambda context=context, reference=reference: work(context, reference)
            for context, reference in zip(contexts, references, strict=True)
        ]
        best = min(together(works) for _ in range(repeat + 1))
        for context, reference in zip(contexts, references, strict=True):
            context.enter()
            reference.close()
    else:
        buffers = [(ctypes.create_string_buffer(nbytes), ctypes.create_string_buffer(nbytes)) for _ in links]
        best = min(
            together([lambda pair=pair: ctypes.memmove(*pair, nbytes) for pair in buffers]) for _ in range(repeat + 1)
        )
    return len(links) * nbytes / best


def limit_of(devices: Sequence[str], images: Sequence[memoryview], repeat: int) -> float:
    """Bytes per second of these images, which the loader has registered, by plain copies to ordinary device memory, all
    at once."""
    from cuda.bindings import driver as cu

    from balloond.backends.cuda import Context, call

    contexts = [Context(int(device.partition(":")[2])) for device in devices]
    step = 8 * MIB  # none crosses a part that is registered by itself

    def work(context: Context, weights: memoryview) -> None:
        context.enter()
        start = ctypes.addressof(ctypes.c_char.from_buffer(weights))
        target = call(cu.cuMemAlloc, step)
        stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        for at in range(0, weights.nbytes, step):
            call(cu.cuMemcpyHtoDAsync, target, start + at, min(step, weights.nbytes - at), stream)
        call(cu.cuStreamSynchronize, stream)
        call(cu.cuStreamDestroy, stream)
        call(cu.cuMemFree, target)

    works = [partial(work, context, weights) for context, weights in zip(contexts, images, strict=True)]
    return sum(weights.nbytes for weights in images) / min(together(works) for _ in range(repeat))


def limit_between(source: str, target: str, repeat: int) -> float:
    """Bytes per second of one plain copy from device to device, the best of some runs."""
    if kind(source) == "cpu":
        return limit([source], "into", repeat)
    from cuda.bindings import driver as cu

    from balloond.backends.cuda import call

    nbytes = LIMIT_BYTES["cuda"]
    call(cu.cuInit, 0)
    contexts, memory = [], []
    for device in (target, source):
        contexts.append(call(cu.cuDevicePrimaryCtxRetain, call(cu.cuDeviceGet, int(device.partition(":")[2]))))
        call(cu.cuCtxSetCurrent, contexts[-1])
        memory.append(call(cu.cuMemAlloc, nbytes))
    call(cu.cuCtxEnablePeerAccess, contexts[0], 0)
    stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def copy() -> None:
        call(cu.cuMemcpyPeerAsync, memory[0], contexts[0], memory[1], contexts[1], nbytes, stream)
        call(cu.cuStreamSynchronize, stream)

    best = min(seconds(copy) for _ in range(repeat + 1))
    for address in memory:
        call(cu.cuMemFree, address)
    return nbytes / best


# --- what is measured


def copied_and_tidied(copy: Callable[[], Tidy]) -> tuple[float, float]:
    """Seconds until all has arrived, and until nothing of it is mapped any more."""
    began = time.perf_counter()
    tidy = copy()
    copied = time.perf_counter() - began
    tidy()
    return copied, time.perf_counter() - began


def times(runs: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    return {"seconds": [copied for copied, _ in runs], "tidied_s": [tidied for _, tidied in runs]}


def loads(shape: str, device: str, links: Sequence[str], settings: argparse.Namespace) -> list[dict[str, Any]]:
    """One shape over these links, in either direction."""
    nbytes = SHAPES[shape]
    transfers = Transfers(links)
    used = transfers.paths()[device]
    if set(used) != set(links):
        print(f"{device} is not reached by {', '.join(sorted(set(links) - set(used)))}: left out", flush=True)
        return []
    transfer = transfers.of(device)
    with extents(device, nbytes) as made, image(nbytes) as view:
        steps = plan([extent.nbytes for extent in made], nbytes, settings.chunk_mib * MIB)
        expected = checksum(view)

        def run(move: Callable[..., Tidy]) -> tuple[float, float]:
            return copied_and_tidied(lambda: move(made, view, steps, lambda chunk: None))

        first, _ = run(transfer.into)
        for at in range(0, nbytes, GIB):
            view[at : at + GIB] = bytes(min(GIB, nbytes - at))
        run(transfer.out_of)
        if checksum(view) != expected:
            raise SystemExit(f"{shape} over {links}: what came out is not what went in")
        rows = [
            {
                "shape": shape,
                "bytes": nbytes,
                "device": device,
                "links": list(links),
                "copy": name,
                **times([run(move) for _ in range(settings.repeat)]),
                "first_s": first if name == "into" else None,
                "limit_bytes_per_s": limit(links, name, settings.repeat),
            }
            for name, move in (("into", transfer.into), ("out of", transfer.out_of))
        ]
        transfers.forget(view)
    return rows


def between(shape: str, source: str, target: str, settings: argparse.Namespace) -> dict[str, Any]:
    """One shape from device to device."""
    nbytes = SHAPES[shape]
    transfers = Transfers()
    transfer = transfers.of(source)
    large = settings.extent_mib * MIB if settings.extent_mib else None
    with extents(target, MIB) as made, image(MIB) as view:  # a loader has copied to either before
        transfers.of(target).into(made, view, plan([made[0].nbytes], MIB, MIB), lambda chunk: None)()
        transfers.forget(view)
    with extents(source, nbytes, large) as here, extents(target, nbytes, large) as there:
        sizes = [[extent.nbytes for extent in made] for made in (here, there)]
        steps = pairs(sizes[0], sizes[1], nbytes, settings.between_chunk_mib * MIB)

        def run() -> tuple[float, float]:
            return copied_and_tidied(lambda: transfer.between(here, there, steps, lambda pair: None))

        first, _ = run()
        return {
            "shape": shape,
            "bytes": nbytes,
            "device": source,
            "links": [f"{source}>{target}"],
            "copy": "between",
            "first_s": first,
            **times([run() for _ in range(settings.repeat)]),
            "limit_bytes_per_s": limit_between(source, target, settings.repeat),
        }


def group(shape: str, devices: Sequence[str], settings: argparse.Namespace) -> dict[str, Any]:
    """One rank of a model on each device, all at once."""
    nbytes = SHAPES[shape]
    transfers = Transfers(devices)
    with ExitStack() as stack:
        there = [stack.enter_context(extents(device, nbytes)) for device in devices]
        images = [stack.enter_context(image(nbytes)) for _ in devices]
        steps = [plan([extent.nbytes for extent in made], nbytes, settings.chunk_mib * MIB) for made in there]

        def run() -> tuple[float, float]:
            """Each tidies up as soon as it is done, beside those that copy still."""
            began = time.perf_counter()
            copied = [0.0] * len(devices)

            def load(number: int) -> None:
                transfer = transfers.of(devices[number])
                tidy = transfer.into(there[number], images[number], steps[number], lambda chunk: None)
                copied[number] = time.perf_counter() - began
                tidy()

            tidied = together([partial(load, number) for number in range(len(devices))])
            return max(copied), tidied

        first, _ = run()
        row = {
            "shape": shape,
            "bytes": len(devices) * nbytes,
            "device": ",".join(devices),
            "links": list(devices),
            "copy": "group",
            "first_s": first,
            **times([run() for _ in range(settings.repeat)]),
            "limit_bytes_per_s": limit(devices, "into", settings.repeat),
        }
        if kind(devices[0]) == "cuda":
            row["limit_of_these_bytes_per_s"] = limit_of(devices, images, settings.repeat)
            print(f"plain copies of the same images: {row['limit_of_these_bytes_per_s'] / 1e9:.1f} GB/s")
        for weights in images:
            transfers.forget(weights)
    return row


def series(device: str, links: str) -> list[tuple[str, ...]]:
    """The sets of links that `--links` means."""
    named = links.split(",")
    if not all(name.isdecimal() for name in named):
        return [tuple(named[:count]) for count in range(1, len(named) + 1)]
    counts = [int(name) for name in named]
    others = [f"{kind(device)}:{number}" for number in range(max(counts) + 1) if f"{kind(device)}:{number}" != device]
    return [(device, *others[: count - 1]) for count in counts]


def main() -> None:
    parser = _report.arguments("load", __doc__ or "")
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--links", default="1,2", help="numbers of links, or their names; empty: only `between`")
    parser.add_argument("--shapes", default="tiny", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--between", metavar="DEVICE", help="also from the device to this one")
    parser.add_argument("--group", metavar="DEVICES", help="only this: onto all of them at once")
    parser.add_argument("--extent-mib", type=int, help="of most extents, for `between`")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--chunk-mib", type=int, default=32)
    parser.add_argument("--between-chunk-mib", type=int, default=64)
    settings = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in settings.shapes.split(","):
        if settings.group:
            rows.append(group(shape, settings.group.split(","), settings))
            continue
        for links in series(settings.device, settings.links) if settings.links else ():
            rows += loads(shape, settings.device, links, settings)
        if settings.between:
            rows.append(between(shape, settings.device, settings.between, settings))
    table = []
    for row in rows:
        middle = _report.quantile(row["seconds"], 0.5)
        rate = row["bytes"] / middle
        table.append(
            (
                row["shape"],
                row["copy"],
                len(row["links"]),
                rate / 1e9,
                f"{middle:.4f}",
                f"{_report.quantile(row['tidied_s'], 0.5):.4f}",
                rate / row["limit_bytes_per_s"],
                row["limit_bytes_per_s"] / 1e9,
                "" if row["first_s"] is None else f"{row['first_s']:.4f}",
            )
        )
    _report.table(("shape", "copy", "links", "GB/s", "s", "tidied s", "of limit", "limit GB/s", "first s"), table)
    _report.write(
        settings.out,
        "load",
        {
            "chunk_bytes": settings.chunk_mib * MIB,
            "between_chunk_bytes": settings.between_chunk_mib * MIB,
            "extent_bytes": EXTENTS,
            "extent_bytes_between": settings.extent_mib * MIB if settings.extent_mib else None,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
