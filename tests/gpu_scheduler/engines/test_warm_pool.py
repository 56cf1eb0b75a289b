import pytest

from gpu_scheduler.engines.base import EngineDied, Spawn
from gpu_scheduler.engines.warm_pool import WarmPool
from services.errors import Refused


@pytest.fixture
async def pool():
    pool = WarmPool(Spawn("echo"), warm=1, limit=2)
    yield pool
    await pool.close()


async def test_a_taken_engine_is_replaced_until_the_limit(pool):
    pool.fill()
    first = await pool.take(30)
    second = await pool.take(30)
    assert first.pid != second.pid
    assert first.index != second.index
    with pytest.raises(Refused, match="all 2 engines"):
        await pool.take(30)


async def test_an_engine_that_comes_back_is_taken_again(pool):
    first = await pool.take(30)
    await pool.take(30)
    pool.give_back(first)
    assert (await pool.take(30)).pid == first.pid


async def test_an_engine_that_takes_one_model_is_not_taken_again():
    pool = WarmPool(Spawn("echo"), warm=1, limit=2, one_model=True)
    first = await pool.take(30)
    pool.give_back(first)
    assert (await pool.take(30)).pid != first.pid
    await first.dead.wait()
    await pool.close()


async def test_a_dead_engine_is_not_handed_out(pool):
    first = await pool.take(30)
    first.kill()
    await first.dead.wait()
    pool.give_back(first)
    assert (await pool.take(30)).alive


async def test_engines_that_do_not_start_are_reported_instead_of_tried_for_ever():
    pool = WarmPool(Spawn("echo", environment={"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}), warm=1, limit=2)
    with pytest.raises(EngineDied, match="do not start"):
        await pool.take(60)
    await pool.close()
