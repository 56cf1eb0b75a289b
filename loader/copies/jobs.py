"""Jobs under way: saves, loads and reads from disk, each followed by any number of callers.

A job runs in a task of its own, so that it does not end with the caller that happened to come first: it goes on until
the last one has gone away. Callers wait for its result only; after that it tidies up, which no caller joins or ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from loader.policy.rate import TransferRate
from services.errors import Conflict, PrismError
from services.rpc.watch import Watched
from services.runtime import tasks
from services.telemetry import log


@dataclass(frozen=True)
class JobTarget:
    """What a job does; two calls for the same target are one job."""

    kind: str
    """Kind of the job: "save", "load", "read" or "prefetch"."""
    model: str
    generation: int
    rank: int = 0
    lease_id: str = ""
    manifest: bytes = b""
    checksum: str = ""
    image_only: bool = False
    """Whether a load must not come from another lease."""


@dataclass(frozen=True)
class JobProgress:
    """How far a job is: the step, its bytes done and in total, bytes per second, and seconds left."""

    step: str
    done: int
    total: int
    per_s: float | None = None
    left_s: float | None = None


@dataclass(frozen=True)
class Result:
    """The image that a job made, or whose bytes it brought somewhere."""

    checksum: str
    total_bytes: int
    source: str = ""
    """Where the bytes of a load came from; empty for other jobs."""


Steps = AsyncGenerator[JobProgress | Result, None]
"""A job's work: progress without rates, and in the end the result, where there is one. It tidies up when the next step
after that is requested."""
_log = log.get(__name__)
_running: set[asyncio.Task[None]] = set()
"""Tasks of jobs, which the loop alone would not keep."""


class CopyJob:
    """One job, under way or ended."""

    def __init__(self, what: JobTarget, steps: Steps, now: Callable[[], float]) -> None:
        self.what = what
        self.callers = 0
        self.result: Result | None = None
        self._now = now
        self._pace = TransferRate()
        self._why = ""
        self._at = Watched(JobProgress("waiting", 0, 0))
        self._task = asyncio.get_running_loop().create_task(self._run(steps), name=f"{what.kind} {what.model}")
        _running.add(self._task)
        self._task.add_done_callback(self._ended)

    @property
    def at(self) -> JobProgress:
        return self._at.value

    async def _run(self, steps: Steps) -> None:
        async with aclosing(steps):
            async for step in steps:
                if isinstance(step, Result):
                    self.result = step
                    self._at.set(self.at)
                else:
                    self._seen(step)

    def _ended(self, task: asyncio.Task[None]) -> None:
        _running.discard(task)
        self._at.set(self.at)
        if self.result is not None and not task.cancelled() and (failure := task.exception()) is not None:
            _log.error("a job did not tidy up", kind=self.what.kind, model=self.what.model, exc_info=failure)

    def _seen(self, at: JobProgress) -> None:
        if at.step != self.at.step:
            self._pace = TransferRate()
        self._pace = self._pace.seen(self._now(), at.done)
        self._at.set(JobProgress(at.step, at.done, at.total, self._pace.per_s(), self._pace.left_s(at.total)))

    async def follow(self) -> AsyncIterator[JobProgress]:
        """Yields the progress now, then again when it has moved on, with what lies between left out. It ends when there
        is a result or, without one, when the task does. Raises what the task ended with then, Conflict when it was
        cancelled."""
        told = None
        while self.result is None and not self._task.done():
            seen, told = self._at.revision, self.at
            yield told
            await self._at.changed(seen)
        if self.result is None:
            self._raise_failure()
        if self.at != told:
            yield self.at

    def _raise_failure(self) -> None:
        if self._task.cancelled():
            raise Conflict(self._why or "cancelled")
        failure = self._task.exception()
        if isinstance(failure, PrismError):
            raise type(failure)(str(failure))  # a new one for this caller: each adds its own trace
        if failure is not None:
            raise failure

    async def cancel(self, why: str) -> None:
        """Cancels the job and returns when it has ended."""
        self._why = self._why or why
        await tasks.cancel(self._task)


class Jobs:
    """All jobs of a process. `now` returns seconds on any clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._jobs: dict[JobTarget, CopyJob] = {}

    def of(self, model: str, lease_id: str = "") -> Sequence[CopyJob]:
        """Jobs of a model, or of one lease of it, that have no result yet."""
        return [
            job
            for what, job in self._jobs.items()
            if what.model == model and (not lease_id or what.lease_id == lease_id) and job.result is None
        ]

    async def follow(self, what: JobTarget, start: Callable[[], Steps]) -> AsyncGenerator[JobProgress | Result, None]:
        """The progress of the job that does `what`, started if there is none; ends with its result, where it has one.
        Raises what `CopyJob.follow` does. Closing it ends the job unless other callers follow."""
        job = self._jobs.get(what)
        if job is None or job.result is not None:
            # What that job did may be undone by now: an engine that slept has other extents.
            job = self._jobs[what] = CopyJob(what, start(), self._now)
        job.callers += 1
        try:
            async for at in job.follow():
                yield at
            if job.result is not None:
                yield job.result
        finally:
            job.callers -= 1
            if not job.callers:
                # A call that comes now begins anew, and waits for the end of this job where the two would meet.
                self._forget(job)
                if job.result is None:
                    await job.cancel("no request waits for it any more")

    async def cancel(self, model: str, lease_id: str = "") -> int:
        """Ends the jobs of a model, or of one lease of it, and returns how many, once they have ended."""
        chosen = self.of(model, lease_id)
        for job in chosen:
            self._forget(job)
        await asyncio.gather(*(job.cancel(f"the {job.what.kind} of {model} was cancelled") for job in chosen))
        return len(chosen)

    def _forget(self, job: CopyJob) -> None:
        if self._jobs.get(job.what) is job:
            del self._jobs[job.what]
