"""A process that loads weights as the loader does, over and over, and says when it began and ended each time.

A process of its own, as the loader is, so that its threads do not hold up whoever measures others meanwhile. Times are
of `time.monotonic`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from services.telemetry import log

Span = tuple[float, float]
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Order:
    """What to load: `nbytes` into new extents of `device`, `at_once` times at once, for at least `seconds`."""

    device: str
    links: Sequence[str]
    """That may carry it, the device's own first."""
    spare: bool
    """Whether links whose devices work for others are spared, as the loader does."""
    nbytes: int
    seconds: float
    at_once: int = 1


class Loads:
    """The parent's side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, order: Order) -> list[list[Span]]:
        """For each that ran at once its loads one after the other, but the first, in which contexts are made and host
        memory is registered. Raises RuntimeError."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(vars(order)).encode() + b"\n")
        async with asyncio.timeout(TIMEOUT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that loads died")
        return [[(begin, end) for begin, end in spans] for spans in json.loads(line)]


@contextlib.asynccontextmanager
async def loads() -> AsyncIterator[Loads]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.gpu.loads"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Loads(process)
    finally:
        process.kill()
        await process.wait()


def carry_out(order: Order) -> list[list[Span]]:
    from benchmarks.load import MIB, extents, image
    from loader.policy.chunks import plan
    from loader.transfers import Transfers, busy

    transfers = Transfers(order.links, busy.look) if order.spare else Transfers(order.links)
    transfer = transfers.of(order.device)
    spans: list[list[Span]] = [[] for _ in range(order.at_once)]
    ready = threading.Barrier(order.at_once)
    ends: list[float] = []

    def over_and_over(mine: list[Span]) -> None:
        with extents(order.device, order.nbytes) as made, image(order.nbytes) as weights:
            steps = plan([extent.nbytes for extent in made], order.nbytes, 32 * MIB)
            transfer.into(made, weights, steps, lambda chunk: None)()
            if ready.wait() == 0:
                ends.append(time.monotonic() + order.seconds)
            ready.wait()
            while not mine or time.monotonic() < ends[0]:
                begun = time.monotonic()
                tidy = transfer.into(made, weights, steps, lambda chunk: None)
                mine.append((begun, time.monotonic()))
                tidy()
            transfers.forget(weights)

    threads = [threading.Thread(target=over_and_over, args=(mine,)) for mine in spans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return spans


def main() -> None:
    log.configure("loads", "warning")
    for line in sys.stdin:
        print(json.dumps(carry_out(Order(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
