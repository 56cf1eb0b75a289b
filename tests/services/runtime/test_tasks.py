import asyncio

import pytest

from services.errors import TimedOut
from services.runtime import tasks


async def test_what_ends_in_time_returns_its_result():
    async def work():
        return 7

    assert await tasks.within(work(), 60.0) == 7


async def test_what_does_not_is_cancelled_and_says_after_how_long():
    waiting = asyncio.get_running_loop().create_future()
    with pytest.raises(TimedOut, match="not done within 0 s"):
        await tasks.within(waiting, 0.0)
    assert waiting.cancelled()


async def test_limit_counts_from_the_last_thing_that_happened():
    waiting = asyncio.get_running_loop().create_future()
    idle = iter((0.0, 0.0, 1.0))
    with pytest.raises(TimedOut, match="not done within 0 s"):
        await tasks.within(waiting, 0.01, lambda: next(idle))
    assert waiting.cancelled() and next(idle, None) is None, "it was asked until nothing had happened for so long"


async def test_work_that_takes_longer_than_its_limit_returns_what_it_returns_if_something_happened():
    waiting = asyncio.get_running_loop().create_future()

    def idle_s():
        if not waiting.done():
            waiting.set_result(7)
        return 0.0

    assert await tasks.within(waiting, 0.01, idle_s) == 7


async def test_an_error_of_the_work_passes():
    async def work():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await tasks.within(work(), 60.0)
