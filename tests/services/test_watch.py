import asyncio

from services.watch import Watched


async def test_a_follower_gets_the_present_value_first_and_then_the_latest_after_changes():
    watched = Watched(1)
    follower = watched.follow()
    assert await anext(follower) == 1
    watched.set(2)
    watched.set(3)
    assert await anext(follower) == 3, "what was overtaken is left out"


async def test_a_change_while_nobody_waits_is_not_lost():
    watched = Watched(0)
    follower = watched.follow()
    await anext(follower)
    watched.set(1)
    assert await asyncio.wait_for(anext(follower), 20) == 1


async def test_a_value_that_does_not_change_is_told_again_after_the_longest_interval():
    follower = Watched("same").follow(max_interval_s=0.01)
    assert [await anext(follower), await anext(follower)] == ["same", "same"]


async def test_every_waiter_sees_a_change():
    watched = Watched(0)
    waiting = [asyncio.get_running_loop().create_task(watched.changed(0)) for _ in range(3)]
    await asyncio.sleep(0)
    watched.set(1)
    await asyncio.gather(*waiting)
