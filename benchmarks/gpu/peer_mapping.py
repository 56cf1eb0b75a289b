"""What it takes to give several GPUs access to extents of one, and what of it need not be paid for every copy.

    python -m benchmarks.gpu.peer_mapping --out DIR --commit HASH [--count 8]

Extents of GPU 0, imported from descriptors as the loader does it, are mapped one after the other with access for GPU 0
and for its peers. A row is one such series: the first call of each kind, the median of the others and the longest.

    alone            access for GPU 0
    peers: N         access for GPU 0 and N peers, in addresses reserved anew
    beside mapped    the same, while other extents are mapped for all in other addresses
    again            extents were mapped in these addresses before, and unmapped
    small first      a first extent of 2 MiB
    own, then peers  access for GPU 0 for all extents, then for the peers in calls of their own
    peer access on   the same as `peers`, with cuCtxEnablePeerAccess between all contexts
    peer copied      the same as `peers`, right after a copy between the GPUs
    from a peer      extents of GPU 1 mapped for GPU 0 alone, from GPU 0's context

    A beside B       as `peers`, extents of A MiB, while one of B MiB is mapped for all in other addresses (0: none)

`copies meanwhile` are calls of cuMemcpyAsync (8 MiB from pinned memory) on GPU 0 and on GPU 1, by threads of their own,
while such a series is mapped: the longest that one took.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import driver as cu

from balloond.backends.cuda import Context, CudaMaker, access, call
from benchmarks.gpu import report

MIB = 1 << 20
DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
Found = dict[str, list[float]]
"""Seconds of each call, by its name."""


class Series:
    """Extents that are mapped back to back."""

    def __init__(self, fds: Sequence[tuple[int, int]], base: int = 0) -> None:
        """`fds`: descriptors with their bytes; `base`: addresses to use, else they are reserved."""
        self.found: Found = {}
        self._fds = fds
        self._own = not base
        self._span = sum(nbytes for _, nbytes in fds)
        self._base = base or int(call(cu.cuMemAddressReserve, self._span, 0, 0, 0))
        self._mapped: list[tuple[int, int, Any]] = []

    def timed(self, function: Callable[..., Any], *arguments: object) -> Any:
        began = time.perf_counter()
        result = call(function, *arguments)
        self.found.setdefault(function.__name__, []).append(time.perf_counter() - began)
        return result

    def map(self, accesses: Sequence[Any]) -> Series:
        at = self._base
        for fd, nbytes in self._fds:
            handle = self.timed(cu.cuMemImportFromShareableHandle, fd, DESCRIPTOR)
            self.timed(cu.cuMemMap, at, nbytes, 0, handle, 0)
            self.timed(cu.cuMemSetAccess, at, nbytes, accesses, len(accesses))
            self._mapped.append((at, nbytes, handle))
            at += nbytes
        return self

    def allow(self, accesses: Sequence[Any]) -> Series:
        for at, nbytes, _ in self._mapped:
            self.timed(cu.cuMemSetAccess, at, nbytes, accesses, len(accesses))
        return self

    def close(self) -> Found:
        for at, nbytes, handle in self._mapped:
            self.timed(cu.cuMemUnmap, at, nbytes)
            self.timed(cu.cuMemRelease, handle)
        if self._own:
            call(cu.cuMemAddressFree, self._base, self._span)
        return self.found


class Copier:
    """Copies from pinned memory to a GPU by a thread, all the time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._stop = False
        self.longest = 0.0
        context.enter()
        self._host = int(call(cu.cuMemAllocHost, 8 * MIB))
        self._device = int(call(cu.cuMemAlloc, 8 * MIB))
        self._stream = call(cu.cuStreamCreate, cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        self._context.enter()
        while not self._stop:
            for _ in range(8):
                began = time.perf_counter()
                call(cu.cuMemcpyHtoDAsync, self._device, self._host, 8 * MIB, self._stream)
                self.longest = max(self.longest, time.perf_counter() - began)
            call(cu.cuStreamSynchronize, self._stream)

    def close(self) -> float:
        self._stop = True
        self._thread.join()
        return self.longest


def copy_between(contexts: Sequence[Context]) -> None:
    memory = []
    for context in contexts[:2]:
        context.enter()
        memory.append(int(call(cu.cuMemAlloc, 64 * MIB)))
    call(cu.cuMemcpy, memory[0], memory[1], 64 * MIB)
    call(cu.cuCtxSynchronize)
    for address in memory:
        call(cu.cuMemFree, address)


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=8, help="extents")
    parser.add_argument("--extent-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 8, 64, 256, 512], help="MiB")
    given = parser.parse_args()
    call(cu.cuInit, 0)
    devices = int(call(cu.cuDeviceGetCount))
    contexts = [Context(index) for index in range(devices)]
    for context in reversed(contexts):
        context.enter()
    nbytes = given.extent_mib * MIB
    makers = [CudaMaker(index) for index in range(2)]
    fds, others = ([(maker.create(nbytes), nbytes) for _ in range(given.count)] for maker in makers)
    spare = [(makers[0].create(nbytes), nbytes) for _ in range(given.count)]
    small = [(makers[0].create(2 * MIB), 2 * MIB)]
    everyone, first = [access(index) for index in range(devices)], [access(0)]
    rows: list[dict[str, Any]] = []

    def record(name: str, found: Found) -> None:
        rows.append({"series": name, "seconds": found})

    def peers(name: str) -> None:
        record(name, Series(fds).map(everyone).close())

    for _ in range(given.rounds):
        record("alone", Series(fds).map(first).close())
        for count in range(1, devices):
            record(f"peers: {count}", Series(fds).map(everyone[: count + 1]).close())
        beside = Series(spare).map(everyone)
        record("beside mapped, the others", beside.found)
        peers("beside mapped")
        beside.close()
        region = int(call(cu.cuMemAddressReserve, nbytes * given.count, 0, 0, 0))
        Series(fds, region).map(everyone).close()
        record("again", Series(fds, region).map(everyone).close())
        call(cu.cuMemAddressFree, region, nbytes * given.count)
        record("small first", Series([*small, *fds]).map(everyone).close())
        record("small alone", Series(small).map(everyone).close())
        both = Series(fds).map(first)
        record("own", both.found)
        both.found = {}
        record("then peers", both.allow(everyone[1:]).close())
        time.sleep(0.5)
        peers("after half a second")
        copy_between(contexts)
        peers("peer copied")
        contexts[0].enter()
        record("from a peer", Series(others).map(first).close())
        copiers = [Copier(context) for context in contexts[:2]]
        contexts[0].enter()
        time.sleep(0.1)
        quiet = [copier.longest for copier in copiers]
        for copier in copiers:
            copier.longest = 0.0
        peers("copies meanwhile")
        record("copies meanwhile, longest", {f"GPU {n}": [quiet[n], c.close()] for n, c in enumerate(copiers)})
        for context in contexts:
            context.enter()
            for other in contexts:
                if other is not context:
                    cu.cuCtxEnablePeerAccess(other._context, 0)
        contexts[0].enter()
        peers("peer access on")
        for context in contexts:
            context.enter()
            for other in contexts:
                if other is not context:
                    cu.cuCtxDisablePeerAccess(other._context)
        contexts[0].enter()
    for fd, _ in [*fds, *others, *spare, *small]:
        os.close(fd)
    for size, beside in [(size, beside) for size in given.sizes for beside in (0, *given.sizes)]:
        made = [(makers[0].create(mib * MIB), mib * MIB) for mib in (*[size] * given.count, beside) if mib]
        anchor = Series(made[given.count :]).map(everyone) if beside else None
        record(f"{size} beside {beside}", Series(made[: given.count]).map(everyone).close())
        if anchor is not None:
            record(f"{size} beside {beside}, that", anchor.found)
            anchor.close()
        for fd, _ in made:
            os.close(fd)
    cells = []
    for row in rows:
        for name, times in row["seconds"].items():
            rest = 1e3 * statistics.median(times[1:] or times)
            if 1e3 * max(times) > 0.3 or name == "cuMemSetAccess":
                cells.append((row["series"], name, f"{1e3 * times[0]:.2f}", f"{rest:.2f}", f"{1e3 * max(times):.2f}"))
    header = ("series", "call", "first ms", "median", "longest")
    report.table(f"{given.count} extents of {given.extent_mib} MiB", header, cells)
    body = {"extent_bytes": nbytes, "devices": devices, "rows": rows}
    report.write(given.out, "gpu_peer_mapping", given.commit, body)


if __name__ == "__main__":
    main()
