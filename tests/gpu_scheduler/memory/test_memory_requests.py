"""Memory requests reach balloond as the core decided them, and are answered in any case."""

import asyncio

import pytest

from gpu_scheduler.memory.memory_requests import MemoryRequests
from gpu_scheduler.policy.queue.decisions import RequestMemory
from services.errors import Unavailable
from testing.patience import PATIENCE_S

REQUEST = RequestMemory("a", 100, "r")


class Devices:
    """Answers at once: there is room, or so much is missing."""

    def __init__(self, short=0, fails=False):
        self.short = short
        self.fails = fails
        self.asked = []

    async def make_room(self, model, *, bytes, may_retract, hold_ms, timeout_s):
        self.asked.append((model, bytes, may_retract, hold_ms, timeout_s))
        if self.fails:
            raise Unavailable("balloond is away")
        return self.short, "cpu:0"


@pytest.mark.parametrize(
    ("devices", "granted"), [(Devices(), True), (Devices(short=5), False), (Devices(fails=True), False)]
)
async def test_a_memory_request_is_answered_by_whether_there_is_room(devices, granted):
    answer = asyncio.get_running_loop().create_future()
    MemoryRequests(devices, lambda *given: answer.set_result(given)).make(REQUEST)
    async with asyncio.timeout(PATIENCE_S):
        assert await answer == (REQUEST, granted)
    assert devices.asked == [("a", 100, False, 1000, 5.0)]


async def test_a_memory_request_without_devices_is_not_answered():
    answers = []
    MemoryRequests(None, lambda *given: answers.append(given)).make(REQUEST)
    for _ in range(5):
        await asyncio.sleep(0)
    assert answers == []
