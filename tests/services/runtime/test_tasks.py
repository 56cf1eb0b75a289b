import asyncio

import pytest

from services.errors import TimedOut
from services.runtime import tasks


async def test_within_returns_the_result_of_work_that_ends_in_time():
    async def work():
        return 7

    assert await tasks.within(work(), 60.0) == 7


async def test_within_cancels_work_that_takes_too_long_and_says_after_how_long():
    waiting = asyncio.get_running_loop().create_future()
    with pytest.raises(TimedOut, match="not done within 0 s"):
        await tasks.within(waiting, 0.0)
    assert waiting.cancelled()


async def test_within_counts_its_limit_from_the_last_progress():
    waiting = asyncio.get_running_loop().create_future()
    idle = iter((0.0, 0.0, 1.0))
    with pytest.raises(TimedOut, match="not done within 0 s"):
        await tasks.within(waiting, 0.01, lambda: next(idle))
    assert waiting.cancelled() and next(idle, None) is None, "it was asked until nothing had happened for so long"


async def test_within_returns_the_result_of_work_that_takes_longer_but_made_progress():
    waiting = asyncio.get_running_loop().create_future()

    def idle_s():
        if not waiting.done():
            waiting.set_result(7)
        return 0.0

    assert await tasks.within(waiting, 0.01, idle_s) == 7


async def test_within_passes_an_error_of_the_work_on():
    async def work():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await tasks.within(work(), 60.0)
