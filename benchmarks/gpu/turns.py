"""Two sides that share a GPU and its host in turns of half a second: one runs, the processes of the other are stopped.

A machine's cores drift by tens of percent within seconds when it has neighbours. In turns this short both sides meet
the same drift, and each has a clock of its own, which stands while the other runs: by that clock a load goes on as if
the side had the machine to itself. What a stopped side has on the GPU ends in the other's turn, for both alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from benchmarks.gpu import cores


class Clock:
    """Seconds in which a side ran. `now` is the wall's clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._walls: list[float] = []
        """When it was started and stopped, in turn."""
        self._ran: list[float] = []
        """What it said then."""
        self._going = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._going.is_set()

    def start(self) -> None:
        self._note(self._ran[-1] if self._ran else 0.0)
        self._going.set()

    def stop(self) -> None:
        self._note(self._ran[-1] + self._now() - self._walls[-1])
        self._going.clear()

    def _note(self, ran: float) -> None:
        self._walls.append(self._now())
        self._ran.append(ran)

    def at(self, wall: float) -> float:
        """What it said, or will say if nobody stops it, at `wall`."""
        number = bisect_right(self._walls, wall) - 1
        if number < 0:
            return 0.0
        ran = self._ran[number]
        stood = number % 2 == 1
        return ran if stood else ran + wall - self._walls[number]

    def now(self) -> float:
        return self.at(self._now())

    async def reach(self, due: float) -> None:
        """Returns when it says `due`."""
        while (left := due - self.now()) > 0:
            await self._going.wait()
            await asyncio.sleep(left)


class Processes:
    """Those of a side, with all that they started so far."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._pids = [pid for root in roots for pid in (root, *cores.descendants(root))]

    def stop(self) -> None:
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, which: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)


def order(turns: int) -> Iterator[int]:
    """Whose turn it is: 0 1 1 0, 0 1 1 0, ..., so that a drift cancels out."""
    for number in range(turns):
        yield (0, 1, 1, 0)[number % 4]


async def take(clocks: Sequence[Clock], processes: Sequence[Processes], turn_s: float, turns: int) -> None:
    """So many turns, a multiple of four; both sides stand before and after. Between two turns of the same side nothing
    happens."""
    sides = list(order(turns))
    for number, side in enumerate(sides):
        if not clocks[side].running:
            processes[side].go_on()
            clocks[side].start()
        await asyncio.sleep(turn_s)
        if number + 1 == turns or sides[number + 1] != side:
            processes[side].stop()
            clocks[side].stop()
