"""What idle engines keep, booked with a device that has so many bytes."""

import asyncio

import pytest

from balloond.client import WARM_ENGINES
from gpu_scheduler.engines.engine import Spawn
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.warm_booking import WarmBooking
from services.errors import Refused, Unavailable
from services.runtime import tasks
from testing.patience import PATIENCE_S


class Devices:
    """Books what fits into `room`."""

    def __init__(self):
        self.room = 1000
        self.away = False
        self.booked = {}
        self.changed = asyncio.Condition()

    async def book(self, model, *, quota_bytes, weights_bytes, floor_bytes):
        self._check()
        if quota_bytes > self.room:
            raise Refused(f"{quota_bytes} of {self.room}")
        assert weights_bytes == floor_bytes == 0
        await self._set({model: quota_bytes})

    async def drop(self, model):
        await self._set({})

    def _check(self):
        if self.away:
            self.away = False  # it is back when it is asked next
            raise Unavailable("balloond is away")

    async def _set(self, booked):
        async with self.changed:
            self.booked = booked
            self.changed.notify_all()

    async def are(self, booked):
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: self.booked == booked)


class Group:
    def __init__(self):
        self.devices = Devices()
        self.pool = WarmPool(Spawn("echo"), warm=1, limit=2)
        self.booking = WarmBooking([self.pool], self.devices, again_s=0.01)

    async def used_engine(self):
        """Idle, after a model."""
        engine = await self.pool.take(PATIENCE_S)
        engine.kept_bytes = 600
        self.pool.give_back(engine)
        return engine


@pytest.fixture
async def group():
    group = Group()
    keeping = tasks.spawn(group.booking.keep(), "keep")
    yield group
    await tasks.cancel(keeping)
    await group.pool.close()


async def test_warm_booking_of_an_idle_engine_lasts_until_a_model_takes_the_engine(group):
    engine = await group.used_engine()
    await group.devices.are({WARM_ENGINES: 600})
    assert group.pool.take_idle() is engine
    await group.booking.lower()
    assert group.devices.booked == {}


async def test_an_engine_that_never_had_a_model_has_nothing_booked(group):
    group.pool.give_back(await group.pool.take(PATIENCE_S))
    group.booking.forget()
    await group.booking.lower()
    assert group.devices.booked == {} and group.pool.idle == 1


async def test_warm_booking_of_a_dead_engine_is_dropped(group):
    engine = await group.used_engine()
    await group.devices.are({WARM_ENGINES: 600})
    engine.kill()
    await group.devices.are({})


async def test_warm_booking_of_a_predecessor_is_left_over_until_an_engine_keeps_something(group):
    assert not group.booking.books(WARM_ENGINES)
    await group.used_engine()
    assert group.booking.books(WARM_ENGINES) and not group.booking.books("m")


async def test_idle_engine_whose_memory_finds_no_room_to_be_booked_ends(group):
    group.devices.room = 500
    engine = await group.used_engine()
    await engine.dead.wait()
    await group.devices.are({})


async def test_an_engine_whose_model_was_still_booked_stays(group):
    group.devices.room = 500
    refused, book = asyncio.Event(), group.devices.book

    async def refuse_once(*args, **keys):
        try:
            await book(*args, **keys)
        finally:
            group.devices.room = 1000
            refused.set()

    group.devices.book = refuse_once
    engine = await group.used_engine()
    await refused.wait()
    await group.devices.are({WARM_ENGINES: 600})
    assert engine.alive


async def test_idle_engines_give_way_to_a_model(group):
    assert not await group.booking.give_way()
    engine = await group.used_engine()
    await group.devices.are({WARM_ENGINES: 600})
    assert await group.booking.give_way()
    assert group.devices.booked == {} and not engine.alive


async def test_warm_booking_is_made_again_with_another_balloond_and_once_that_is_back(group):
    await group.used_engine()
    await group.devices.are({WARM_ENGINES: 600})
    group.devices.booked, group.devices.away = {}, True
    group.booking.forget()
    await group.devices.are({WARM_ENGINES: 600})
