"""Room is asked of balloond once at a time for each model, and not as fast as it can answer."""

import asyncio
from math import inf

import pytest

from gpu_scheduler.memory.memory_requests import MemoryRequests
from gpu_scheduler.policy.queue.decisions import NeedMemory
from services.errors import Unavailable
from testing.patience import PATIENCE_S

NEED = NeedMemory("a", 100, "r", 1.0)


class Devices:
    """Answers at once: there is room, or so much is missing."""

    def __init__(self, short=0, fails=False):
        self.short = short
        self.fails = fails
        self.asked = []

    async def make_room(self, model, *, bytes, may_retract, hold_ms, timeout_s):
        self.asked.append((model, bytes, may_retract))
        if self.fails:
            raise Unavailable("balloond is away")
        return self.short, "cpu:0"


class Queue:
    """Plans again whenever it is told of room, and may lack the same once more."""

    def __init__(self, devices, lacks, again_s):
        self.maker = MemoryRequests(devices, self.plan, again_s)
        self.lacks = lacks
        self.plans = 0
        self.planned = asyncio.Condition()

    def plan(self):
        self.plans += 1
        if self.lacks:
            self.maker.need(NEED)
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self):
        async with self.planned:
            self.planned.notify_all()

    async def until(self, plans):
        async with asyncio.timeout(PATIENCE_S), self.planned:
            await self.planned.wait_for(lambda: self.plans >= plans)


async def test_a_model_that_lacks_memory_where_there_is_room_is_not_asked_for_again_at_once():
    devices = Devices()
    queue = Queue(devices, lacks=True, again_s=3600.0)
    queue.maker.need(NEED)
    await queue.until(1)
    for _ in range(100):
        queue.maker.need(NEED)
        await asyncio.sleep(0)
    assert devices.asked == [("a", 100, False)] and queue.plans == 1


async def test_it_is_asked_for_again_after_a_while_without_anything_else_happening():
    devices = Devices()
    queue = Queue(devices, lacks=True, again_s=0.001)
    queue.maker.need(NEED)
    await queue.until(5)
    assert len(devices.asked) >= 2


@pytest.mark.parametrize("model", ["a", "b"])
async def test_other_requests_do_not_wait_for_it(model):
    devices = Devices()
    queue = Queue(devices, lacks=False, again_s=3600.0)
    queue.maker.need(NEED)
    await queue.until(1)
    queue.maker.need(NeedMemory(model, 7, "s", inf))
    await queue.until(2)
    assert devices.asked == [("a", 100, False), (model, 7, False)]


@pytest.mark.parametrize(
    ("stop_decodes", "slack", "may_retract"), [(True, 1.0, True), (True, inf, False), (False, 1.0, False)]
)
async def test_decodes_of_others_stop_only_for_a_request_with_a_target_and_where_that_is_wanted(
    stop_decodes, slack, may_retract
):
    devices, planned = Devices(), asyncio.Event()
    maker = MemoryRequests(devices, planned.set, stop_decodes=stop_decodes)
    maker.need(NeedMemory("a", 100, "r", slack))
    await planned.wait()
    assert devices.asked == [("a", 100, may_retract)]


@pytest.mark.parametrize("devices", [Devices(short=5), Devices(fails=True)])
async def test_where_no_room_came_nobody_plans_and_the_next_need_asks_again(devices):
    queue = Queue(devices, lacks=False, again_s=3600.0)
    queue.maker.need(NEED)
    async with asyncio.timeout(PATIENCE_S):
        while queue.maker._asking:
            await asyncio.sleep(0)
    queue.maker.need(NEED)
    async with asyncio.timeout(PATIENCE_S):
        while queue.maker._asking:
            await asyncio.sleep(0)
    assert len(devices.asked) == 2 and queue.plans == 0
