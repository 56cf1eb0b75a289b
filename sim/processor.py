"""The compute of a group's devices: engines that are busy at the same time get slices of it by weight, or those that
prefill all of it while they do (`gpu_scheduler/policy/precedence.py`). Decodes of not too many requests stand still for
as long as anybody does; real ones make a step each time they have waited for 50 ms, and wait as long for a prefill step
that takes longer.

A prefill step also keeps its host busy, which nobody shares: until that is through the step goes on, whether the
devices have something to do for it or not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Protocol

from gpu_scheduler.policy.decode_turn import Want
from gpu_scheduler.policy.precedence import worth
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
        "done",
        "ended",
        "first",
        "host_until",
        "timer",
        "weight",
    )

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.busy = False
        self.first = 0
        """For how many prompts what it is at goes before what others are at."""
        self.decodes = 0
        """For how many requests, if that is what it is at."""
        self.host_until = 0.0
        """By the clock, when its host is through with what it is at."""
        self.computed = False
        """Its devices are, and the host is not."""
        self.weight = 1.0
        """Of its slices, beside those of others."""
        self.ended = False
        """What it was at is through, and what comes next is not said yet."""
        self._left = 0.0
        """Seconds of work alone, at `at`."""
        self._rate = 0.0
        """Seconds of its work for each of the clock's, since then."""
        self.at = 0.0
        self.timer: Timer | None = None


class Decoder(Protocol):
    """An engine as its neighbours see it (`gpu_scheduler/policy/decode_turn.py`)."""

    @property
    def want(self) -> Want: ...

    @property
    def wants(self) -> bool:
        """Whether it decodes and wants to be first."""
        ...

    def joined(self) -> None:
        """Another one has begun to decode."""
        ...


class Processor:
    """Shares itself among the tasks that are busy."""

    def __init__(self, clock: Clock, sharing: float, precedence_batch: int = 0) -> None:
        self._clock = clock
        self._sharing = sharing
        self._precedence_batch = precedence_batch
        self._busy: list[Task] = []
        self.decoding: dict[str, Decoder] = {}
        """Engines that have something to decode, by name."""
        self.places = count(1)
        """Of engines."""

    @property
    def busy(self) -> int:
        return len(self._busy)

    def work(
        self,
        task: Task,
        seconds: float,
        first: int = 0,
        decodes: int = 0,
        host_s: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        """`task.done` is called when so much work is through, and `host_s` from now at the earliest. Replaces what it
        was at. `first`: for so many prompts others stand still meanwhile, but for those that decode for too many
        requests (`decodes`)."""
        self._stop(task)
        if not task.busy:
            task.busy = True
            self._busy.append(task)
        task._left, task.first, task.decodes, task.ended, task.computed = seconds, first, decodes, False, False
        task.host_until, task.weight = self._clock.now + host_s, weight
        self._share(new=task)

    def stands_still(self, decodes: int) -> bool:
        """Whether decodes for so many requests do now."""
        return worth(self._prompts, decodes, self._precedence_batch)

    @property
    def _prompts(self) -> int:
        """That others stand still for."""
        return sum(task.first for task in self._busy)

    def left(self, task: Task) -> float:
        """Seconds of work that are left of what it is at."""
        return max(0.0, task._left - (self._clock.now - task.at) * task._rate)

    def rest(self, task: Task) -> None:
        """It has nothing to do."""
        self._stop(task)
        if task.busy:
            task.busy = task.computed = False
            task.first = 0
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
        task.done()

    def _stop(self, task: Task) -> None:
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None
        task._left, task._rate, task.at = self.left(task), 0.0, self._clock.now

    def _share(self, new: Task | None = None) -> None:
        prompts = self._prompts
        goes = [task for task in self._busy if task.first or not worth(prompts, task.decodes, self._precedence_batch)]
        weights = [task.weight for task in goes if not task.computed]
        whole = 1.0 if len(weights) <= 1 else self._sharing
        total = sum(weights) or 1.0
        for task in self._busy:
            rate = whole * task.weight / total if task in goes else 0.0
            if task.ended or task.computed or (task is not new and rate == task._rate):
                continue
            self._stop(task)
            task._rate = rate
            if rate > 0:
                task.timer = self._clock.after(task._left / rate, self._through, task)
