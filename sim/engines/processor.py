"""The compute of a group's devices: engines that are busy at the same time get equal slices of it. A prefill step goes
first (`gpu_scheduler/engines/sharing/prefill_priority.py`) until it is over, or has gone first for as long as it may:
engines that decode for not too many requests are told, and stand still from their next step on that is not decided yet
(`decode_order.py`).

An engine that leaves the devices idle for a part of its time, as decodes of small models do, whose hosts are slower,
needs no whole slice: the others share what is left of it.

A prefill step also keeps its host busy, which no other engine shares: until the host is through the step goes on,
whether the devices have work for it or not. Where the host is slower than the devices the step reaches them piece by
piece, and an engine that decodes beside it has them for a slice after each piece (`Task.gaps`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.prefill_priority import worth
from sim.clock import Clock, Timer


class Task:
    """One engine's work: at most one piece at a time."""

    __slots__ = (
        "_left",
        "_rate",
        "at",
        "busy",
        "computed",
        "decodes",
        "devices",
        "done",
        "ended",
        "first",
        "first_until",
        "gaps",
        "host",
        "host_until",
        "timer",
    )

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.busy = False
        self.first = 0
        """Number of prompts for which its present work goes before that of others; 0: it does not go first."""
        self.first_until: Timer | None = None
        self.decodes = False
        """Whether its present work is decoding."""
        self.devices = 1.0
        """Share of the time of its work alone in which the devices are busy."""
        self.host_until = 0.0
        """Second on the clock at which its host is through with the present work."""
        self.host = self.gaps = 0.0
        """For each second of its work alone: seconds of its host, and seconds that it takes longer beside decodes that
        always keep the devices busy."""
        self.computed = False
        """Whether its devices are through, and its host is not."""
        self.ended = False
        """Whether its present work is through, and the next was not given yet."""
        self._left = 0.0
        """Seconds of work alone that were left at second `at`."""
        self._rate = 0.0
        """Seconds of its work done in each second of the clock since then."""
        self.at = 0.0
        self.timer: Timer | None = None


class Decoder(Protocol):
    """An engine as its neighbours see it (`decode_order.py`)."""

    @property
    def bid(self) -> DecodeBid | None:
        """Its bid for decode steps; None: it makes none."""
        ...

    def joined(self) -> None:
        """Notes that another engine has begun to decode."""
        ...

    def claimed(self) -> None:
        """Notes that a prefill step has begun that goes first."""
        ...


class Processor:
    """The devices' compute, shared among the tasks that are busy."""

    def __init__(
        self, clock: Clock, sharing: float, prefill_priority_batch: int = 0, decode_sharing: float | None = None
    ) -> None:
        """`sharing`: share of one engine's work that several engines do together; `decode_sharing`: the same while all
        of them decode (None: `sharing`)."""
        self._clock = clock
        self._sharing = sharing
        self._decode_sharing = sharing if decode_sharing is None else decode_sharing
        self.prefill_priority_batch = prefill_priority_batch
        self._busy: list[Task] = []
        self.decoding: dict[str, Decoder] = {}
        """Engines that have something to decode, by name."""
        self._standing: dict[Callable[[], None], int] = {}
        """Function to call once nothing goes first any more -> number of requests that its engine decodes."""
        self.places = count(1)
        """Numbers for engines, in the order in which they come; they tell equal bids apart."""

    @property
    def busy(self) -> int:
        return len(self._busy)

    def work(
        self,
        task: Task,
        seconds: float,
        first: int = 0,
        first_s: float = 0.0,
        decodes: bool = False,
        devices: float = 1.0,
        host_s: float = 0.0,
        gaps_s: float = 0.0,
    ) -> None:
        """Gives a task new work in place of the present one; `task.done` is called once `seconds` of it are done, and
        after `host_s` seconds at the earliest. `first`: number of prompts for which others stand still for `first_s`
        seconds at most, except those that decode for too many requests. `devices`: share of its time alone in which the
        devices are busy with it. `gaps_s`: seconds that it takes longer beside decodes that leave the devices nothing,
        if those do not stand still."""
        self._stop(task)
        if not task.busy:
            task.busy = True
            self._busy.append(task)
        task._left, task.decodes, task.devices = seconds, decodes, devices
        task.ended = task.computed = False
        task.host_until = self._clock.now + host_s
        task.host, task.gaps = (host_s / seconds, gaps_s / seconds) if gaps_s > 0 else (0.0, 0.0)
        self._goes_first(task, first if first_s > 0 else 0, first_s)
        self._share(new=task)
        if task.first:
            for decoder in list(self.decoding.values()):
                decoder.claimed()

    def _goes_first(self, task: Task, prompts: int, seconds: float = 0.0) -> None:
        if task.first_until is not None:
            task.first_until.cancel()
            task.first_until = None
        task.first = prompts
        if prompts:
            task.first_until = self._clock.after(seconds, self._first_no_more, task)
        if self._standing:
            self._let_go()

    def _first_no_more(self, task: Task) -> None:
        self._goes_first(task, 0)
        self._share()

    def stands_still(self, decodes: int) -> bool:
        """Whether decodes for so many requests stand still now."""
        return worth(self.prompts, decodes, self.prefill_priority_batch)

    def wait(self, decodes: int, then: Callable[[], None]) -> None:
        """Has `then` called, once, when decodes for so many requests need not stand still any more."""
        self._standing[then] = decodes

    def wait_no_more(self, then: Callable[[], None]) -> None:
        """Drops the call of `then`, if it was still to come."""
        self._standing.pop(then, None)

    def _let_go(self) -> None:
        for then, decodes in list(self._standing.items()):
            if not self.stands_still(decodes):
                del self._standing[then]
                self._clock.after(0.0, then)

    @property
    def prompts(self) -> int:
        """Number of prompts for which others stand still."""
        return sum(task.first for task in self._busy)

    def left(self, task: Task) -> float:
        """Seconds of work that are left of the task's present work."""
        return max(0.0, task._left - (self._clock.now - task.at) * task._rate)

    def rest(self, task: Task) -> None:
        """Notes that the task has nothing to do."""
        self._stop(task)
        if task.busy:
            task.busy = task.computed = False
            self._goes_first(task, 0)
            self._busy.remove(task)
            self._share()

    def _through(self, task: Task) -> None:
        self._stop(task)
        task._left = 0.0
        if task.host_until > self._clock.now:
            task.computed = True
            task.timer = self._clock.at(task.host_until, self._through, task)
            self._share()
            return
        task.ended = True
        self._goes_first(task, 0)
        task.done()

    def _stop(self, task: Task) -> None:
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None
        task._left, task._rate, task.at = self.left(task), 0.0, self._clock.now

    def _share(self, new: Task | None = None) -> None:
        rates = self._rates([task for task in self._busy if not task.computed])
        for task in self._busy:
            rate = rates.get(task, 0.0)
            if task.ended or task.computed or (task is not new and rate == task._rate):
                continue
            self._stop(task)
            task._rate = rate
            if rate > 0:
                task.timer = self._clock.after(task._left / rate, self._through, task)

    def _rates(self, tasks: Sequence[Task]) -> dict[Task, float]:
        """Work per second of these tasks, which all want the devices: equal slices, but none gets more than it is busy
        with."""
        if len(tasks) == 1:
            return {tasks[0]: 1.0}
        left = self._decode_sharing if all(task.decodes for task in tasks) else self._sharing
        rates = dict[Task, float]()
        decodes = sum(task.devices for task in tasks if task.decodes)
        for number, task in enumerate(sorted(tasks, key=lambda task: (task.gaps == 0, task.devices))):
            got = min(task.devices, left / (len(tasks) - number))
            if task.gaps and decodes:
                got /= 1 + got * _slices(task, decodes)
            left -= got
            rates[task] = got / task.devices
        return rates


def _slices(task: Task, decodes: float) -> float:
    """Seconds that each second of a prefill step's work takes longer beside decodes that keep the devices busy for such
    a share of the time: each of its pieces waits for a slice of theirs, except pieces that come while they have nothing
    to do."""
    return min(task.gaps, task.host * decodes / (1 - decodes)) if decodes < 1 else task.gaps
