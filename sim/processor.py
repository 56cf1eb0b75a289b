"""The compute of a group's devices: engines that are busy at the same time get equal slices of it."""

from __future__ import annotations

from collections.abc import Callable

from sim.clock import Clock, Timer


class Task:
    """One engine's work: at most one piece at a time."""

    __slots__ = ("_left", "at", "busy", "done", "timer")

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.busy = False
        self._left = 0.0
        """Seconds of work alone, at `at`."""
        self.at = 0.0
        self.timer: Timer | None = None


class Processor:
    """Shares itself among the tasks that are busy."""

    def __init__(self, clock: Clock, sharing: float) -> None:
        self._clock = clock
        self._sharing = sharing
        self._busy: list[Task] = []
        self._rate = 1.0
        """Of each busy task: seconds of its work for each of the clock's."""

    @property
    def busy(self) -> int:
        return len(self._busy)

    def work(self, task: Task, seconds: float) -> None:
        """`task.done` is called when so much work is through. Replaces what it was at."""
        if task.timer is not None:
            task.timer.cancel()
        if not task.busy:
            task.busy = True
            self._busy.append(task)
            self._share(without=task)
        task._left, task.at = seconds, self._clock.now
        task.timer = self._clock.after(seconds / self._rate, self._through, task)

    def left(self, task: Task) -> float:
        """Seconds of work that are left of what it is at."""
        return max(0.0, task._left - (self._clock.now - task.at) * self._rate)

    def rest(self, task: Task) -> None:
        """It has nothing to do."""
        if task.timer is not None:
            task.timer.cancel()
            task.timer = None
        if task.busy:
            task.busy = False
            self._busy.remove(task)
            self._share(without=task)

    def _through(self, task: Task) -> None:
        task.timer = None
        task._left, task.at = 0.0, self._clock.now
        task.done()

    def _share(self, without: Task) -> None:
        count = len(self._busy)
        rate = 1.0 if count <= 1 else self._sharing / count
        if rate == self._rate:
            return
        for task in self._busy:
            if task is not without:
                task._left, task.at = self.left(task), self._clock.now
                if task.timer is not None:
                    task.timer.cancel()
                    task.timer = self._clock.after(task._left / rate, self._through, task)
        self._rate = rate
