"""Jobs: shared by who asks for the same, ended by the last who leaves or by a call."""

import asyncio
from contextlib import aclosing

import pytest

from loader.copies.jobs import JobProgress, Jobs, JobTarget, Result
from services.errors import Conflict, Unmet
from testing.patience import PATIENCE_S

WHAT = JobTarget("load", "m", 1, lease_id="lease")


class Work:
    """Steps that the test lets go on, one by one."""

    def __init__(self):
        self.started = 0
        self.closed = 0
        self.more = asyncio.Queue()

    async def steps(self):
        self.started += 1
        try:
            while True:
                step = await self.more.get()
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    return
                yield JobProgress("copying", step, 100)
        finally:
            self.closed += 1


class Clock:
    def __init__(self):
        self.time = 0.0

    def __call__(self):
        self.time += 0.5
        return self.time


@pytest.fixture
def jobs():
    return Jobs(Clock())


@pytest.fixture
def work():
    return Work()


def follow(jobs, work, seen, what=WHAT):
    async def following():
        async with aclosing(jobs.follow(what, work.steps)) as steps:
            async for at in steps:
                seen.append(at.done)

    return asyncio.get_running_loop().create_task(following())


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


async def test_caller_with_the_target_of_a_running_job_joins_it_and_gets_its_progress(jobs, work):
    first, second = [], []
    one = follow(jobs, work, first)
    work.more.put_nowait(10)
    await until(lambda: 10 in first)
    two = follow(jobs, work, second)
    work.more.put_nowait(50)
    await until(lambda: 50 in first and 50 in second)
    assert [(job.what, job.callers, job.at.done) for job in jobs.of("m")] == [(WHAT, 2, 50)]
    work.more.put_nowait(None)
    await asyncio.gather(one, two)
    assert work.started == work.closed == 1 and not jobs.of("m")


async def test_job_goes_on_until_its_last_caller_has_left(jobs, work):
    seen = []
    one, two = follow(jobs, work, []), follow(jobs, work, seen)
    await until(lambda: work.started)
    one.cancel()
    work.more.put_nowait(10)
    await until(lambda: 10 in seen)
    two.cancel()
    await asyncio.wait([two])
    assert work.closed == 1 and not jobs.of("m")


async def test_jobs_of_different_targets_run_and_are_cancelled_separately(jobs, work):
    tasks = [follow(jobs, work, [], what) for what in (WHAT, JobTarget("load", "m", 1, lease_id="other"))]
    await until(lambda: work.started == 2)
    assert len(jobs.of("m")) == 2 and len(jobs.of("m", "other")) == 1 and not jobs.of("n")
    assert await jobs.cancel("m", "other") == 1
    assert not tasks[0].done()
    assert await jobs.cancel("m") == 1
    await asyncio.wait(tasks)


async def test_cancelled_job_raises_the_reason_to_all_callers_and_has_ended_when_cancel_returns(jobs, work):
    tasks = [follow(jobs, work, []) for _ in range(2)]
    await until(lambda: work.started)
    assert await jobs.cancel("m") == 1
    assert work.closed == 1
    for task in tasks:
        with pytest.raises(Conflict, match="the load of m was cancelled"):
            await task
    assert await jobs.cancel("m") == 0


async def test_failed_job_fails_for_all_callers_and_the_next_begins_anew(jobs, work):
    tasks = [follow(jobs, work, []) for _ in range(2)]
    work.more.put_nowait(Unmet("no such image"))
    for task in tasks:
        with pytest.raises(Unmet, match="no such image"):
            await task
    again = follow(jobs, work, [])
    work.more.put_nowait(None)
    await again
    assert work.started == 2


async def test_progress_of_a_job_has_rates_once_they_are_known(jobs, work):
    told = []

    async def following():
        async for at in jobs.follow(WHAT, work.steps):
            told.append(at)

    task = asyncio.get_running_loop().create_task(following())
    for done in (0, 20):
        work.more.put_nowait(done)
        await until(lambda done=done: told and told[-1].step == "copying" and told[-1].done == done)
    work.more.put_nowait(None)
    await task
    first, last = next(at for at in told if at.step == "copying"), told[-1]
    assert (first.per_s, first.left_s) == (None, None)
    assert (last.per_s, last.left_s) == (40, 2)


class Tidying:
    """Work whose result is there at once and whose tidying up the test lets end."""

    def __init__(self):
        self.started = self.tidied = 0
        self.may_end = asyncio.Event()
        self.fails = False

    async def steps(self):
        self.started += 1
        yield JobProgress("copying", 100, 100)
        yield Result(f"rows:{self.started}", 100)
        await self.may_end.wait()
        if self.fails:
            raise OSError(5, "still mapped")
        self.tidied += 1


async def result_of(jobs, work):
    async with aclosing(jobs.follow(WHAT, work.steps)) as steps:
        return [step async for step in steps if isinstance(step, Result)]


async def test_job_gives_its_result_before_its_cleanup_and_callers_do_not_end_that(jobs):
    work = Tidying()
    assert await asyncio.gather(result_of(jobs, work), result_of(jobs, work)) == [[Result("rows:1", 100)]] * 2
    assert work.started == 1 and not work.tidied
    assert not jobs.of("m") and await jobs.cancel("m") == 0
    work.may_end.set()
    await until(lambda: work.tidied == 1)


async def test_caller_during_the_cleanup_of_a_job_starts_a_new_one(jobs):
    work = Tidying()
    following = jobs.follow(WHAT, work.steps)
    async with aclosing(following) as steps:
        async for step in steps:
            if isinstance(step, Result):
                break
        assert await result_of(jobs, work) == [Result("rows:2", 100)]
    work.may_end.set()
    await until(lambda: work.tidied == 2)


async def test_failed_cleanup_of_a_job_is_logged_and_fails_no_caller(jobs, capsys):
    work = Tidying()
    work.fails = True
    assert await result_of(jobs, work)
    work.may_end.set()
    await until(lambda: "a job did not tidy up" in capsys.readouterr().out)


async def test_progress_of_a_job_that_ends_at_once_includes_its_end(jobs):
    async def steps():
        yield JobProgress("copying", 50, 100)
        yield JobProgress("copying", 100, 100)

    async with aclosing(jobs.follow(WHAT, steps)) as told:
        assert [at.done async for at in told][-1] == 100
