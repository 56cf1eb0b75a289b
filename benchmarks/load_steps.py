"""What the loader's own work takes for each chunk of a copy: links, turns, threads, progress.

    python benchmarks/load_steps.py [--links 1,2,4] [--out FILE]

A copy runs as the loader runs it, over links that move nothing, so that what is left is Python. `moving` are links on
which a chunk takes as long as on a GPU's and no work: their threads sleep and wake for each, which costs more than the
rest. Microseconds for a chunk, of the clock and of a processor; the latter hardly change when others are at work.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import _report
from loader.copies.threads import Moved, counted
from loader.metrics import COPIED
from loader.policy.chunks import Chunk, plan
from loader.transfers.lanes import Lanes, Move

CHUNK_BYTES = 32 << 20
WINDOW_BYTES = 3 * CHUNK_BYTES
"""As of a GPU's link."""
MOVING_S = CHUNK_BYTES / 50e9


class Still:
    """A link on which a chunk takes `seconds` and no work."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def open(self) -> None:
        pass

    def begin(self, move: Move) -> None:
        move(None)

    def finish(self) -> None:
        if self._seconds:
            time.sleep(self._seconds)

    def close(self) -> None:
        pass


def copy(links: int, chunks: int, seconds: float) -> tuple[float, float]:
    """Seconds until all has arrived, and of a processor."""
    steps = plan([chunks * CHUNK_BYTES], chunks * CHUNK_BYTES, CHUNK_BYTES)
    lanes = Lanes(lambda link: Still(seconds), WINDOW_BYTES)

    def work(moved: Moved) -> None:
        copied = COPIED.labels("load")

        def told(part: Chunk) -> None:
            copied.inc(part.nbytes)
            moved(part.nbytes)

        lanes.carry([f"link {number}" for number in range(links)], steps, move=lambda part, stream: None, done=told)

    async def follow() -> None:
        async with aclosing(counted(work)) as told:
            async for _ in told:
                pass

    began, used = time.perf_counter(), time.process_time()
    asyncio.run(follow())
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    parser = _report.arguments("load_steps", __doc__ or "")
    parser.add_argument("--links", default="1,2,4", help="numbers of links")
    parser.add_argument("--repeat", type=int, default=5)
    settings = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for links in map(int, settings.links.split(",")):
        for kind, chunks, seconds in (("still", 10_000, 0.0), ("moving", 2_000, MOVING_S)):
            runs = [copy(links, chunks, seconds) for _ in range(settings.repeat)]
            clock, processor = ([run[which] / chunks for run in runs] for which in (0, 1))
            rows.append({"links": links, "kind": kind, "seconds": clock, "processor_s": processor})
    _report.table(
        ("links", "kind", "us", "us of a processor", "chunks/s"),
        [
            (row["links"], row["kind"], 1e6 * middle, 1e6 * _report.quantile(row["processor_s"], 0.5), 1 / middle)
            for row in rows
            for middle in [_report.quantile(row["seconds"], 0.5)]
        ],
    )
    _report.write(settings.out, "load_steps", {"chunk_bytes": CHUNK_BYTES, "rows": rows})


if __name__ == "__main__":
    main()
