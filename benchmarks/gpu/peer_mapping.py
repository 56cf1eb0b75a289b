"""What it takes to give several GPUs access to extents of one, and what of it need not be paid for every copy.

    python -m benchmarks.gpu.peer_mapping --out DIR --commit HASH [--count 12]

Extents of GPU 0, imported from descriptors as the loader does it, are mapped one after the other with access for GPU 0
and for some peers. A row is one such series: the first call of each kind and the median of the others, in ms.

    alone         access for GPU 0
    peers         access for all, addresses reserved anew
    anchor        the same, while one small extent elsewhere stays mapped for all
    same region   the same, while one small extent in the same reserved region stays mapped for all
    import held   the same as `peers`, while another descriptor of the same memory stays imported
    from a peer   extents of GPU 1 mapped for GPU 0 alone, from GPU 0's context; with an anchor of the same kind
    two threads   series for GPU 0 and for GPU 1 at once, each for all
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


class Clock:
    """Seconds of each call, by its name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def __call__(self, function: Callable[..., Any], *arguments: object) -> Any:
        began = time.perf_counter()
        result = call(function, *arguments)
        self.found.setdefault(function.__name__, []).append(time.perf_counter() - began)
        return result


def map_one(timed: Callable[..., Any], address: int, fd: int, nbytes: int, accesses: Sequence[Any]) -> Any:
    handle = timed(cu.cuMemImportFromShareableHandle, fd, DESCRIPTOR)
    timed(cu.cuMemMap, address, nbytes, 0, handle, 0)
    timed(cu.cuMemSetAccess, address, nbytes, accesses, len(accesses))
    return handle


class Anchor:
    """A small extent that stays mapped."""

    def __init__(self, index: int, accesses: Sequence[Any], address: int = 0) -> None:
        self.fd = CudaMaker(index).create(2 * MIB)
        self._own = 0 if address else int(call(cu.cuMemAddressReserve, 2 * MIB, 0, 0, 0))
        self._address = address or self._own
        self._handle = map_one(call, self._address, self.fd, 2 * MIB, accesses)

    def close(self) -> None:
        call(cu.cuMemUnmap, self._address, 2 * MIB)
        call(cu.cuMemRelease, self._handle)
        if self._own:
            call(cu.cuMemAddressFree, self._own, 2 * MIB)
        os.close(self.fd)


def series(fds: Sequence[int], nbytes: int, accesses: Sequence[Any], base: int = 0) -> dict[str, list[float]]:
    """One pass over all extents; they are unmapped again."""
    timed = Clock()
    start = base or int(call(cu.cuMemAddressReserve, nbytes * len(fds), 0, 0, 0))
    handles = [map_one(timed, start + n * nbytes, fd, nbytes, accesses) for n, fd in enumerate(fds)]
    for n, handle in enumerate(handles):
        timed(cu.cuMemUnmap, start + n * nbytes, nbytes)
        timed(cu.cuMemRelease, handle)
    if not base:
        call(cu.cuMemAddressFree, start, nbytes * len(fds))
    return timed.found


def main() -> None:
    parser = report.arguments(__doc__ or "")
    parser.add_argument("--count", type=int, default=12, help="extents")
    parser.add_argument("--extent-mib", type=int, default=512)
    given = parser.parse_args()
    call(cu.cuInit, 0)
    devices = int(call(cu.cuDeviceGetCount))
    contexts = [Context(index) for index in range(devices)]
    for context in reversed(contexts):
        context.enter()
    nbytes = given.extent_mib * MIB
    makers = [CudaMaker(index) for index in range(2)]
    fds = [[maker.create(nbytes) for _ in range(given.count)] for maker in makers]
    everyone, first = [access(index) for index in range(devices)], [access(0)]
    rows: list[dict[str, Any]] = []

    def record(name: str, found: dict[str, list[float]]) -> None:
        rows.append({"series": name, "seconds": found})

    for _ in range(2):
        record("alone", series(fds[0], nbytes, first))
        for peers in range(1, devices):
            record(f"peers: {peers}", series(fds[0], nbytes, everyone[: peers + 1]))
        anchor = Anchor(0, everyone)
        record("anchor", series(fds[0], nbytes, everyone))
        anchor.close()
        region = int(call(cu.cuMemAddressReserve, nbytes * (given.count + 1), 0, 0, 0))
        anchor = Anchor(0, everyone, region)
        record("same region", series(fds[0], nbytes, everyone, region + nbytes))
        anchor.close()
        call(cu.cuMemAddressFree, region, nbytes * (given.count + 1))
        held = [call(cu.cuMemImportFromShareableHandle, fd, DESCRIPTOR) for fd in fds[0]]
        record("import held", series(fds[0], nbytes, everyone))
        for handle in held:
            call(cu.cuMemRelease, handle)
        contexts[0].enter()
        record("from a peer", series(fds[1], nbytes, first))
        anchor = Anchor(1, first)
        record("from a peer, anchor", series(fds[1], nbytes, first))
        anchor.close()
        both: dict[int, dict[str, list[float]]] = {}

        def work(index: int, both: dict[int, dict[str, list[float]]] = both) -> None:
            contexts[index].enter()
            both[index] = series(fds[index], nbytes, everyone)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        record("two threads, one of them", both[0])
    cells = []
    for row in rows:
        for name, times in row["seconds"].items():
            rest = 1e3 * statistics.median(times[1:])
            if 1e3 * times[0] > 0.3 or rest > 0.1:
                cells.append((row["series"], name, f"{1e3 * times[0]:.2f}", f"{rest:.2f}", f"{1e3 * max(times):.2f}"))
    report.table(
        f"{given.count} extents of {given.extent_mib} MiB", ("series", "call", "first ms", "median", "longest"), cells
    )
    report.write(
        given.out, "gpu_peer_mapping", given.commit, {"extent_bytes": nbytes, "devices": devices, "rows": rows}
    )


if __name__ == "__main__":
    main()
