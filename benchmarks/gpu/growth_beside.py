"""What growing costs the engine that grows: steps of one thread while another maps extents.

    python -m benchmarks.gpu.growth_beside --out DIR --commit HASH [--gb-per-s 1.4] [--sizes 8 64 256] [--seconds 1.5]

Two kinds of steps: a CUDA graph like a decode step's, waited for; and launches of some hundred small kernels, the time
of the host alone, as of a prefill step without graphs. Beside them, at the same rate of bytes for each size of extent:

    map      extents that were made before are imported, mapped and given access to by a thread of the same process
    import   they are imported and let go, nothing more
    make     another process makes extents and closes them, as balloond does
    wake     a thread of the same process wakes as often, and does nothing

`cost` is by how much longer all steps of a second are than undisturbed, for each extent of that second.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends.cuda import CudaMaker, CudaMapper, call
from benchmarks.gpu import report
from benchmarks.gpu.decode_like import DecodeLike

MIB = 1 << 20
SPAN = 8 << 30
"""Of addresses and of extents, used again and again."""
DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
Tick = Callable[[int], None]


class Ticking:
    """Calls `tick` so often in a thread, with the number of the call."""

    def __init__(self, tick: Tick, apart_s: float) -> None:
        self.ticks = 0
        self._tick, self._apart_s = tick, apart_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Ticking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        due = time.perf_counter()
        while not self._stop.is_set():
            self._tick(self.ticks)
            self.ticks += 1
            due += self._apart_s
            self._stop.wait(max(0.0, due - time.perf_counter()))


class Beside:
    """What may be done beside the steps, by name, for one size of extent."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._mapper = CudaMapper(0)
        self._base = self._mapper.reserve(SPAN)
        self._fds = [CudaMaker(0).create(nbytes) for _ in range(SPAN // nbytes)]
        self._mapped: set[int] = set()

    def map(self, number: int) -> None:
        slot = number % len(self._fds)
        if slot in self._mapped:
            raise RuntimeError("more is mapped than there are extents: give less time")
        self._mapper.map(self._base + slot * self._nbytes, self._fds[slot], self._nbytes)
        self._mapped.add(slot)

    def import_(self, number: int) -> None:
        handle = call(cu.cuMemImportFromShareableHandle, self._fds[number % len(self._fds)], DESCRIPTOR)
        call(cu.cuMemRelease, handle)

    def wake(self, number: int) -> None: ...

    def clear(self) -> None:
        for slot in self._mapped:
            self._mapper.unmap(self._base + slot * self._nbytes, self._nbytes)
        self._mapped.clear()

    def close(self) -> None:
        self.clear()
        self._mapper.release(self._base, SPAN)
        for fd in self._fds:
            os.close(fd)


MAKE = """
import os, sys, time
from balloond.backends.cuda import CudaMaker
nbytes, apart = int(sys.argv[1]), float(sys.argv[2])
maker, held, due = CudaMaker(0), [], time.perf_counter()
while True:
    held.append(maker.create(nbytes))
    if len(held) > 32:
        os.close(held.pop(0))
    due += apart
    time.sleep(max(0.0, due - time.perf_counter()))
"""


class Steps:
    """The two kinds."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._decode = DecodeLike()
        self._small = torch.zeros(64, device="cuda:0")

    def decode(self) -> None:
        self._decode.step()
        self._decode.stream.synchronize()

    def launches(self) -> None:
        for _ in range(400):
            self._small.add_(1.0)

    def timed(self, kind: str, seconds: float) -> list[float]:
        """Of each step, in seconds."""
        step, found = getattr(self, kind), []
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            step()
            found.append(time.perf_counter() - began)
            if kind == "launches":
                self._torch.cuda.synchronize()
        return found


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--gb-per-s", type=float, default=1.4)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 256], help="MiB")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each, in each of the rounds")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    steps = Steps()
    samples: dict[tuple[str, str, int], list[float]] = {}
    ticks: dict[tuple[str, str, int], int] = {}

    def take(kind: str, name: str, size: int) -> None:
        samples.setdefault((kind, name, size), []).extend(steps.timed(kind, given.seconds))

    for size in given.sizes:
        beside, apart_s = Beside(size * MIB), size * MIB / given.gb_per_s / 1e9
        for _ in range(given.rounds):
            for kind in ("decode", "launches"):
                take(kind, "nothing", size)
                for name, tick in (("map", beside.map), ("import", beside.import_), ("wake", beside.wake)):
                    with Ticking(tick, apart_s) as ticking:
                        take(kind, name, size)
                    ticks[kind, name, size] = ticks.get((kind, name, size), 0) + ticking.ticks
                    beside.clear()
                making = subprocess.Popen([sys.executable, "-c", MAKE, str(size * MIB), str(apart_s)])
                time.sleep(1.0)  # it starts
                take(kind, "make", size)
                ticks[kind, "make", size] = ticks.get((kind, "make", size), 0) + int(given.seconds / apart_s)
                making.kill()
                making.wait()
        beside.close()
    cells: list[tuple[Any, ...]] = []
    for (kind, name, size), times in samples.items():
        mean, alone = statistics.fmean(times), statistics.fmean(samples[kind, "nothing", size])
        times.sort()
        tick = ticks.get((kind, name, size), 0)
        cost = f"{1e3 * (sum(times) - alone * len(times)) / tick:.2f}" if tick else ""
        middle, late = times[len(times) // 2], times[int(0.99 * len(times))]
        cells.append(
            (
                kind,
                size,
                name,
                f"{1e3 * middle:.3f}",
                f"{1e3 * mean:.3f}",
                f"{1e3 * late:.3f}",
                f"{mean / alone:.4f}",
                cost,
            )
        )
    header = ("steps", "MiB", "beside", "p50 ms", "mean", "p99", "ratio", "cost, ms an extent")
    report.table(f"{given.gb_per_s} GB/s of growth", header, cells)
    rows = [
        {
            "steps": kind,
            "beside": name,
            "extent_mib": size,
            "extents": ticks.get((kind, name, size), 0),
            "seconds": times,
        }
        for (kind, name, size), times in samples.items()
    ]
    report.write(given.out, "gpu_growth_beside", given.commit, {"gb_per_s": given.gb_per_s, "rows": rows})


if __name__ == "__main__":
    main()
