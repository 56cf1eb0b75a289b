"""A group that is stopped lets what runs go first."""

import asyncio

import pytest

from gpu_scheduler.residency.graceful_exit import GracefulExit
from gpu_scheduler.residents import Residents


class World:
    def __init__(self, requests=1, heard_s=60.0):
        self.residents = Residents(lambda resident: None)
        self.told = 0
        self.leaving = GracefulExit(self.residents, lambda: requests, self._tell, heard_s)

    def _tell(self):
        assert self.residents.stopping
        self.told += 1

    def leave(self):
        return asyncio.get_running_loop().create_task(self.leaving.leave())


async def test_graceful_exit_waits_as_long_as_a_follower_holds_it():
    world = World()
    with world.leaving.watched():
        left = world.leave()
        await asyncio.sleep(0)
        assert world.told == 1
        with world.leaving.held():
            with world.leaving.held():
                await asyncio.sleep(0)
            for _ in range(3):
                await asyncio.sleep(0)
            assert not left.done()
        await left


@pytest.mark.parametrize("requests, watched", [(0, True), (1, False)])
async def test_graceful_exit_without_requests_or_followers_ends_at_once(requests, watched):
    world = World(requests)
    if watched:
        with world.leaving.watched():
            await world.leaving.leave()
    else:
        await world.leaving.leave()
    assert world.residents.stopping and world.told == 1


async def test_graceful_exit_does_not_wait_long_for_a_follower_that_does_not_hold_it():
    world = World(heard_s=0.01)
    with world.leaving.watched():
        await world.leaving.leave()
