"""A lease's weights go to another's through a real keeper and a real balloond, over several links."""

import asyncio
import os

import pytest

from loader.copying import Copying
from loader.handoff_client import HandoffClient
from loader.transfers import Transfers
from services import tasks
from services.errors import NotFound, Unmet

CONTENT = os.urandom(1_300_000)


@pytest.fixture
async def copying(node):
    """Of a second loader on the node, which has no images."""
    handoff = HandoffClient(node.handoff, answer_timeout_s=10)
    running = tasks.spawn(handoff.run(), "handoff")
    transfers = Transfers(("cpu:0", "cpu:1"))
    yield Copying(None, None, handoff, transfers.of, chunk_bytes=65536, threads=2, answer_timeout_s=10)
    await tasks.cancel(running)


async def between(copying, source, target):
    return [step async for step in copying.between(source.lease.lease_id, target.lease.lease_id, len(CONTENT))]


async def test_weights_are_copied_from_lease_to_lease_and_both_can_leave_afterwards(node, copying):
    source, target = await node.engine("a", CONTENT), await node.engine("b", bytes(len(CONTENT)))
    steps = await between(copying, source, target)
    assert steps == sorted(steps) and steps[-1] == len(CONTENT)
    assert target.content() == source.content() == CONTENT
    for engine in (source, target):
        await asyncio.to_thread(engine.range.leave)
    async with asyncio.timeout(30):
        async for state in node.balloond.watch():
            if state is not None and not state.devices[0].leased_bytes:
                break


async def test_a_copy_back_and_forth_at_the_same_time_ends(node, copying):
    first, second = await node.engine("a", CONTENT), await node.engine("b", bytes(len(CONTENT)))
    await asyncio.gather(between(copying, first, second), between(copying, second, first))
    assert first.content() == second.content()


async def test_a_lease_that_is_gone_or_too_small_is_said(node, copying):
    source, small = await node.engine("a", CONTENT), await node.engine("b", bytes(1000))
    with pytest.raises(Unmet, match="do not hold 1300000"):
        await between(copying, source, small)
    with pytest.raises(NotFound, match="nobody"):
        async for _ in copying.between(source.lease.lease_id, "nobody", 1):
            pass
