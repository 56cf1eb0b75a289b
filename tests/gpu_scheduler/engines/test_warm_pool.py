import asyncio
import re

import pytest

from gpu_scheduler.engines.engine import EngineDied, EngineProcess, Spawn
from gpu_scheduler.engines.warm_pool import WarmPool
from services.errors import Refused
from services.runtime import tasks
from testing.patience import PATIENCE_S


@pytest.fixture
async def pool():
    pool = WarmPool(Spawn("echo"), warm=1, limit=2)
    yield pool
    await pool.close()


async def test_a_taken_engine_is_replaced_until_the_limit(pool):
    pool.fill()
    first = await pool.take(PATIENCE_S)
    second = await pool.take(PATIENCE_S)
    assert first.pid != second.pid
    assert first.index != second.index
    with pytest.raises(Refused, match="all 2 engines"):
        await pool.take(PATIENCE_S)


async def test_an_engine_that_comes_back_is_taken_again(pool):
    first = await pool.take(PATIENCE_S)
    await pool.take(PATIENCE_S)
    pool.give_back(first)
    assert (await pool.take(PATIENCE_S)).pid == first.pid


def had_a_model(engine):
    engine.kept_bytes = 600
    return engine


async def test_engine_that_had_a_model_is_taken_before_one_that_never_had():
    pool = WarmPool(Spawn("echo"), warm=2, limit=2)
    fresh, used = await pool.take(PATIENCE_S), had_a_model(await pool.take(PATIENCE_S))
    pool.give_back(fresh)
    pool.give_back(used)
    assert await pool.take(PATIENCE_S) is used
    assert await pool.take(PATIENCE_S) is fresh
    await pool.close()


async def test_surplus_engine_that_ends_is_the_one_that_never_had_a_model(pool):
    fresh, used = await pool.take(PATIENCE_S), had_a_model(await pool.take(PATIENCE_S))
    pool.give_back(fresh)
    pool.give_back(used)
    await fresh.dead.wait()
    assert pool.engines == [used]


async def test_used_engines_that_are_ended_for_their_memory_are_followed_by_new_ones(pool):
    used = had_a_model(await pool.take(PATIENCE_S))
    assert not await pool.end_used()
    pool.give_back(used)
    assert pool.kept_bytes == 600
    assert await pool.end_used()
    assert not used.alive and pool.kept_bytes == 0
    assert (await warm_other_than(pool, used)).alive


async def test_a_taken_engine_is_replaced_once_its_model_is_up(pool):
    first = await pool.take(PATIENCE_S)
    pool.fill()
    assert repr(pool) == "WarmPool(echo: 0 warm, 0 starting, 1 taken)"
    pool.settled(first)
    assert repr(pool) == "WarmPool(echo: 0 warm, 1 starting, 1 taken)"
    assert await warm_other_than(pool, first) is not first


async def test_a_taken_engine_whose_model_takes_too_long_is_replaced_all_the_same():
    pool = WarmPool(Spawn("echo"), warm=1, limit=2, unsettled_s=0.0)
    first = await pool.take(PATIENCE_S)
    assert (await warm_other_than(pool, first)).alive
    await pool.close()


async def test_engines_for_several_waiting_models_start_side_by_side():
    pool = WarmPool(Spawn("echo"), warm=0, limit=3)
    waiting = [tasks.spawn(pool.take(PATIENCE_S), "take") for _ in range(4)]
    await asyncio.sleep(0)
    assert repr(pool) == "WarmPool(echo: 0 warm, 3 starting, 0 taken)"
    told = await asyncio.gather(*waiting, return_exceptions=True)
    assert len({engine for engine in told if not isinstance(engine, Refused)}) == 3
    assert sum(isinstance(each, Refused) for each in told) == 1
    await pool.close()


@pytest.mark.parametrize("has_process", [False, True])
async def test_a_pool_that_closes_ends_engines_that_are_being_started(monkeypatch, has_process):
    started, processes = asyncio.Event(), []
    start = EngineProcess.start

    async def recorded(*given):
        engine = await start(*given)
        processes.append(engine)
        started.set()
        return engine

    monkeypatch.setattr(EngineProcess, "start", recorded)
    pool = WarmPool(Spawn("echo"), warm=1, limit=2)
    pool.fill()
    waiting = tasks.spawn(pool.take(PATIENCE_S), "take")
    await (started.wait() if has_process else asyncio.sleep(0))
    async with asyncio.timeout(PATIENCE_S):
        await pool.close()
        with pytest.raises(EngineDied, match="the group has ended"):
            await waiting
    assert pool.starting == [] and len(processes) == 1
    await processes[0].dead.wait()


async def test_an_engine_that_takes_one_model_is_not_taken_again():
    pool = WarmPool(Spawn("echo"), warm=1, limit=2, one_model=True)
    first = await pool.take(PATIENCE_S)
    pool.give_back(first)
    assert (await pool.take(PATIENCE_S)).pid != first.pid
    await first.dead.wait()
    await pool.close()


async def test_a_dead_engine_is_not_handed_out(pool):
    first = await pool.take(PATIENCE_S)
    first.kill()
    await first.dead.wait()
    pool.give_back(first)
    assert (await pool.take(PATIENCE_S)).alive


@pytest.fixture
async def small_pool():
    """Nothing but the death of its engine makes room for another."""
    pool = WarmPool(Spawn("echo"), warm=1, limit=1)
    pool.fill()
    yield pool
    await pool.close()


async def test_warm_engine_that_dies_is_replaced_before_a_model_needs_it(small_pool):
    assert small_pool.starting == ["starting"]
    first = await small_pool.take(PATIENCE_S)
    small_pool.give_back(first)
    first.kill()
    second = await warm_other_than(small_pool, first)
    assert second.alive and small_pool.engines == [second]
    assert (small_pool.starting, small_pool.error, small_pool.given_up) == ([], "", False)


async def test_warm_engines_that_die_one_after_the_other_are_not_replaced_for_ever(small_pool):
    died = None
    for _ in range(3):
        died = await warm_other_than(small_pool, died)
        died.kill()
        await died.dead.wait()
    await asyncio.sleep(0)  # whoever watched it
    assert repr(small_pool) == "WarmPool(echo: 0 warm, 0 starting, 0 taken)"
    assert small_pool.error == f"engine {died.pid} died before it had a model" and small_pool.given_up
    assert (await small_pool.take(PATIENCE_S)).alive


async def warm_other_than(pool, before):
    async with asyncio.timeout(PATIENCE_S), pool.changed:
        await pool.changed.wait_for(lambda: pool.idle and pool.engines[0] is not before)
    return pool.engines[0]


@pytest.mark.parametrize("taken", [True, False])
async def test_engine_start_that_found_no_process_left_is_tried_again(monkeypatch, taken):
    pool = WarmPool(Spawn("echo"), warm=1, limit=3)
    start, failures = EngineProcess.start, [BlockingIOError(11, "no process left")]

    async def started(*arguments):
        if failures:
            raise failures.pop()
        return await start(*arguments)

    monkeypatch.setattr(EngineProcess, "start", started)
    if taken:
        assert (await pool.take(PATIENCE_S)).alive
    else:
        pool.fill()
        async with asyncio.timeout(PATIENCE_S), pool.changed:
            await pool.changed.wait_for(lambda: pool.idle)
    await pool.close()


async def test_engines_that_do_not_start_are_reported_instead_of_tried_for_ever():
    pool = WarmPool(Spawn("echo", environment={"PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}), warm=1, limit=2)
    assert (pool.starting, pool.error, pool.given_up) == ([], "", False)
    with pytest.raises(EngineDied, match="do not start"):
        await pool.take(PATIENCE_S)
    assert re.fullmatch(r"engine \d+ died", pool.error) and pool.given_up
    await pool.close()
