"""Which calls of the driver a load spends its time in.

    python -m benchmarks.gpu.load_calls --out DIR [--links 1,2,4] [--between cuda:1] [--group cuda:0,cuda:1]

The loader's transfer of 8B weights as in `benchmarks/load.py`, with every call of the driver timed: how often, seconds
together, the longest. Calls of several threads overlap, so their sum may be more than the load takes. First those until
all has arrived, then those of tidying up after it. `--group`: as many bytes onto each of the devices at once, for each
of `--windows` (MiB that a link has under way).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks import load
from benchmarks.gpu import report
from loader.policy.chunks import pairs, plan
from loader.transfers import Transfers
from loader.transfers.base import Tidy

CHUNK_BYTES = 32 << 20
"""The loader's own; twice as much between devices."""
SHOWN_S = 0.0005


class Calls:
    """Stands between the code and the driver."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real = real
        self._lock = threading.Lock()
        self.found: dict[str, list[float]] = {}
        """Name -> times, seconds, longest."""

    def __call__(self, function: Callable[..., Any], *arguments: object) -> Any:
        begun = time.perf_counter()
        try:
            return self._real(function, *arguments)
        finally:
            seconds = time.perf_counter() - begun
            with self._lock:
                entry = self.found.setdefault(function.__name__, [0, 0.0, 0.0])
                entry[0] += 1
                entry[1] += seconds
                entry[2] = max(entry[2], seconds)


def group(devices: Sequence[str], nbytes: int, measured: Callable[[str, Callable[[], Tidy]], None]) -> None:
    transfers = Transfers(devices)
    with ExitStack() as stack:
        there = [stack.enter_context(load.extents(device, nbytes)) for device in devices]
        images = [stack.enter_context(load.image(nbytes)) for _ in devices]
        steps = [plan([extent.nbytes for extent in made], nbytes, CHUNK_BYTES) for made in there]
        tidies: list[Tidy] = []

        def one(number: int) -> None:
            transfer = transfers.of(devices[number])
            tidies.append(transfer.into(there[number], images[number], steps[number], lambda chunk: None))

        def run() -> Tidy:
            load.together([partial(one, number) for number in range(len(devices))])

            def tidy() -> None:
                while tidies:
                    tidies.pop()()

            return tidy

        measured("group", run)
        for image in images:
            transfers.forget(image)


def main() -> None:
    from balloond.backends import cuda
    from loader.transfers import cuda as transfers_cuda
    from loader.transfers import pinned

    parser = report.arguments(__doc__ or "")
    parser.add_argument("--links", default="1,2,4")
    parser.add_argument("--between", metavar="DEVICE")
    parser.add_argument("--group", metavar="DEVICES")
    parser.add_argument("--windows", default="96", help="MiB, for --group")
    given = parser.parse_args()
    calls = Calls(cuda.call)
    for module in (cuda, transfers_cuda, pinned):
        module.call = calls  # type: ignore[attr-defined]
    nbytes, device = load.SHAPES["8b"], f"cuda:{given.device}"
    rows: list[dict[str, Any]] = []

    def timed(name: str, work: Callable[[], Any]) -> Any:
        calls.found.clear()
        begun = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        rows.append({"copy": name, "seconds": seconds, "calls": dict(calls.found)})
        return result

    def measured(name: str, work: Callable[[], Tidy]) -> None:
        work()()
        for _ in range(3):
            timed(f"{name}, tidying up", timed(name, work))
        shown = [
            (row["copy"], f"{1e3 * row['seconds']:.1f}", call, times, f"{1e3 * together:.1f}", f"{1e3 * longest:.2f}")
            for row in rows[-2:]
            for call, (times, together, longest) in row["calls"].items()
            if together >= SHOWN_S
        ]
        report.table(name, ("copy", "ms", "call", "times", "ms together", "longest ms"), shown)

    if given.group:
        for window in given.windows.split(","):
            transfers_cuda._WINDOW_BYTES = int(window) << 20
            group(given.group.split(","), nbytes, lambda name, work, window=window: measured(f"{name}, {window}", work))
    with load.extents(device, nbytes) as made:
        sizes = [extent.nbytes for extent in made]
        for links in load.series(device, given.links) if given.links else ():
            transfers = Transfers(links)
            with load.image(nbytes) as image:
                steps, transfer = plan(sizes, nbytes, CHUNK_BYTES), transfers.of(device)

                def into(transfer: Any = transfer, image: memoryview = image, steps: Any = steps) -> Tidy:
                    return transfer.into(made, image, steps, lambda chunk: None)  # type: ignore[no-any-return]

                measured(f"over {len(links)} links", into)
                transfers.forget(image)
        if given.between:
            with load.extents(given.between, nbytes) as there:
                both = pairs(sizes, sizes, nbytes, 2 * CHUNK_BYTES)
                transfer = Transfers().of(device)
                measured("between", lambda: transfer.between(made, there, both, lambda pair: None))
    report.write(given.out, "gpu_load_calls", given.commit, {"extents": len(made), "rows": rows})


if __name__ == "__main__":
    main()
