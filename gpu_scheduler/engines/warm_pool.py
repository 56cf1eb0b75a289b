"""Warm engines, which have done their imports and wait for a model (paper, section 6: engine pool).

A taken engine is replaced in the background, so that the next activation finds one too: but only once its model is up,
since importing beside it would cost that model a second. An engine whose model left comes back and takes another model
in the same process; one in which something of the model stayed is dead by then. Engines that had a model are taken
first, and kept if there are too many: their kernels are loaded. They keep memory of the devices for that, which is
booked (`gpu_scheduler/memory/warm_booking.py`). `limit` bounds engine processes of the group, taken ones included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gpu_scheduler.engines.engine import EngineDied, EngineProcess, Spawn
from gpu_scheduler.engines.kinds import KINDS
from services.errors import Refused, TimedOut
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_MOST_START_FAILURES = 3
_STEADY_S = 60.0
"""Seconds after which the death of a warm engine starts a new count of failures in a row."""
_UNSETTLED_S = 20.0
"""Seconds after which a model that is still coming up (from a cold checkpoint, with kernels to compile) no longer keeps
the pool from being filled."""


class WarmPool:
    """Warm engines of one kind."""

    def __init__(
        self,
        spawn: Spawn,
        *,
        warm: int,
        limit: int,
        board_fd: int | None = None,
        first_index: int = 1,
        one_model: bool = False,
        unsettled_s: float = _UNSETTLED_S,
    ) -> None:
        """Keeps `warm` idle engines while fewer than `limit` engines exist. `one_model`: an engine that had a model
        takes no other."""
        self._unsettled_s = unsettled_s
        self.spawn = spawn
        self.warm = warm
        self.limit = limit
        self._board_fd = board_fd
        self._first_index = first_index
        self._one_model = one_model
        self._idle: list[EngineProcess] = []
        self._taken: set[EngineProcess] = set()
        self._starting: dict[int, asyncio.Task[None]] = {}
        """Starts under way, by the indices of their engines."""
        self._importing: set[EngineProcess] = set()
        """Engines whose processes exist but are not warm yet."""
        self._waiting = 0
        """Number of callers of `take` for which there is no engine yet."""
        self._unsettled: dict[EngineProcess, asyncio.TimerHandle] = {}
        """Taken engines whose models are not up yet, with the timers that end the wait for them."""
        self.idle_changed: Callable[[], None] = lambda: None
        """Called when idle engines came or went."""
        self.has_started_one = False
        """Whether an engine was ever warm. The first one of a machine reads its libraries from a cold disk, for a
        minute or two."""
        self._failures = 0
        """Engines that did not start, or died before they had a model, since the last one was taken."""
        self._last_failure = ""
        self.changed = asyncio.Condition()
        """Notified when engines came or did not start."""
        self._closed = False

    def __repr__(self) -> str:
        counts = f"{len(self._idle)} warm, {len(self._starting)} starting, {len(self._taken)} taken"
        return f"WarmPool({self.spawn.kind}: {counts})"

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def starting(self) -> list[str]:
        """For each engine that is starting, what it is doing."""
        return [KINDS[self.spawn.kind].first_step] * len(self._starting)

    @property
    def error(self) -> str:
        """Why the last engine without a model did not start, or died; empty if one is warm, or none failed."""
        return self._last_failure if self._failures and not self._idle else ""

    @property
    def given_up(self) -> bool:
        """Whether so many engines failed in a row that no other is started before a model needs one."""
        return bool(self.error) and self._failures >= _MOST_START_FAILURES

    @property
    def engines(self) -> list[EngineProcess]:
        return [*self._idle, *self._taken]

    @property
    def kept_bytes(self) -> int:
        """Bytes that idle engines keep on each device for the models that they had."""
        return sum(engine.kept_bytes for engine in self._idle)

    def fill(self) -> None:
        """Starts as many engines as are missing, unless models are coming up."""
        while (
            not self._closed
            and not self._unsettled
            and len(self._idle) + len(self._starting) < self.warm
            and len(self._idle) + len(self._starting) + len(self._taken) < self.limit
        ):
            self._start()

    def _start(self) -> None:
        used = {engine.index for engine in self.engines} | self._starting.keys()
        index = next(i for i in range(self._first_index, self._first_index + 10_000) if i not in used)
        self._starting[index] = tasks.spawn(self._start_one(index), f"start {self.spawn.kind} engine {index}")

    async def _start_one(self, index: int) -> None:
        engine = None
        try:
            engine = await EngineProcess.start(self.spawn, index, self._board_fd)
            self._importing.add(engine)
            if self._closed:
                engine.kill()
            hello = await engine.hello(self.spawn.start_timeout_s)
            self.has_started_one = True
            tasks.spawn(self._replace_idle(engine), f"engine {engine.pid} while it is warm")
            _log.info("engine warm", engine=engine.pid, kind=hello.engine, version=hello.version)
        except (EngineDied, TimedOut, OSError) as error:  # OSError: no process, memory or descriptor left
            self._failures += 1
            self._last_failure = str(error)
            if not self._closed:
                _log.warning("engine did not start", kind=self.spawn.kind, why=str(error), failures=self._failures)
            if engine is not None:
                engine.kill()
                self._importing.discard(engine)
                engine = None
        finally:
            del self._starting[index]
        async with self.changed:
            if engine is not None:
                self._importing.discard(engine)
                if self._closed or not engine.alive:
                    self._failures += 1
                    self._last_failure = f"engine {engine.pid} died before it had a model"
                    engine.kill()
                else:
                    self._idle.append(engine)
                    self.idle_changed()
            self.changed.notify_all()
        if self._failures < _MOST_START_FAILURES:
            self.fill()

    async def _replace_idle(self, engine: EngineProcess) -> None:
        """Replaces an engine that dies while it waits for a model: nothing else would notice. If engines die one after
        the other, the next `take` reports why."""
        began = time.monotonic()
        await engine.dead.wait()
        if engine in self._idle and not self._closed:
            self._idle.remove(engine)
            self.idle_changed()
            self._failures = 1 if time.monotonic() - began > _STEADY_S else self._failures + 1
            self._last_failure = f"engine {engine.pid} died before it had a model"
            _log.warning("a warm engine died", engine=engine.pid, kind=self.spawn.kind, failures=self._failures)
            if self._failures < _MOST_START_FAILURES:
                self.fill()

    def check_limit(self, returning: int = 0) -> None:
        """Raises Refused if `take` could not give an engine, even if `returning` taken engines were given back."""
        warm = self._starting or any(engine.alive for engine in self._idle)
        if not warm and len(self._taken) - returning >= self.limit:
            raise Refused(f"all {self.limit} engines of this group are taken (engines.limit)")

    def take_idle(self) -> EngineProcess | None:
        """A warm engine, now the caller's, preferably one that had a model; None if there is none. `settled` or
        `give_back` has to follow."""
        self._idle = [engine for engine in self._idle if engine.alive]
        if not self._idle:
            return None
        engine = max(self._idle, key=lambda engine: engine.kept_bytes)
        self._idle.remove(engine)
        self._taken.add(engine)
        self._failures = 0
        loop = asyncio.get_running_loop()
        self._unsettled[engine] = loop.call_later(self._unsettled_s, self.settled, engine)
        self.idle_changed()
        return engine

    async def take(self, timeout_s: float) -> EngineProcess:
        """A warm engine, as from `take_idle`; starts one if there is none. Raises Refused if the limit is reached,
        TimedOut, and EngineDied if engines do not start or the pool has been closed."""
        self._failures = 0
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s), self.changed:
                while (engine := self.take_idle()) is None:
                    if self._closed:
                        raise EngineDied("the group has ended")
                    if self._failures >= _MOST_START_FAILURES:
                        raise EngineDied(f"{self.spawn.kind} engines do not start: {self._last_failure}")
                    if not self._starting:
                        self.check_limit()
                    if len(self._starting) < self._waiting and len(self._starting) + len(self._taken) < self.limit:
                        self._start()
                    await self.changed.wait()
        except TimeoutError:
            raise TimedOut(f"no warm {self.spawn.kind} engine within {timeout_s:.0f} s") from None
        finally:
            self._waiting -= 1
        return engine

    def settled(self, engine: EngineProcess) -> None:
        """The model of a taken engine is up, or takes too long: the pool may be filled again."""
        timer = self._unsettled.pop(engine, None)
        if timer is not None:
            timer.cancel()
            self.fill()

    def give_back(self, engine: EngineProcess) -> None:
        """Takes an engine without a model back. If that is one too many, one ends, preferably one that never had a
        model; a dead one is replaced."""
        self._taken.discard(engine)
        engine.listener = None
        if engine.alive and not (self._closed or self._one_model):
            self._idle.append(engine)
            while len(self._idle) > self.warm:
                self._end(min(reversed(self._idle), key=lambda each: (each.kept_bytes, each is engine)))
            self.idle_changed()
            tasks.spawn(self._notify(), "pool changed")
        elif engine.alive:
            tasks.spawn(engine.stop(), f"stop engine {engine.pid}")
        self.settled(engine)
        self.fill()

    def _end(self, engine: EngineProcess) -> None:
        self._idle.remove(engine)
        tasks.spawn(engine.stop(), f"stop engine {engine.pid}")

    async def end_used(self) -> bool:
        """Ends idle engines that keep memory of the devices, and starts new ones, which keep none. False if there were
        none to end."""
        used = [engine for engine in self._idle if engine.kept_bytes]
        self._idle = [engine for engine in self._idle if not engine.kept_bytes]
        await asyncio.gather(*(engine.stop() for engine in used))
        self.idle_changed()
        self.fill()
        return bool(used)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def close(self) -> None:
        """Ends every engine, taken and starting ones included."""
        self._closed = True
        for timer in self._unsettled.values():
            timer.cancel()
        for engine in self._importing:
            engine.kill()
        starts = list(self._starting.values())
        await asyncio.gather(*(engine.stop() for engine in self.engines), *starts, return_exceptions=True)
