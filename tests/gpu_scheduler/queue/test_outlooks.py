"""The outlook for new requests, as gateways are told it."""

from __future__ import annotations

import asyncio

from gpu_scheduler.queue.outlooks import OutlookNews
from gpu_scheduler.queue.streams import PulledStream
from protos import common_pb2, gpu_scheduler_pb2
from testing.patience import PATIENCE_S


class Group:
    """A group whose queue is as long as `queue_s` says."""

    def __init__(self) -> None:
        self.queue_s = 1.0
        self.built = 0
        self.news = OutlookNews(self.build)

    def build(self) -> gpu_scheduler_pb2.Outlook:
        self.built += 1
        return gpu_scheduler_pb2.Outlook(models=[gpu_scheduler_pb2.ModelOutlook(model="m", queue_s=self.queue_s)])


async def told(stream: PulledStream) -> float:
    """The next outlook on the stream."""
    async with asyncio.timeout(PATIENCE_S):
        async for message in stream.messages():
            if message.HasField("outlook"):
                return float(message.outlook.models[0].queue_s)
    raise AssertionError("the stream has ended")


async def test_gateway_that_follows_is_told_the_outlook_at_once_and_after_a_change() -> None:
    group, stream, other = Group(), PulledStream(1), PulledStream(2)
    group.news.follow(stream, True)
    assert await told(stream) == 1.0
    group.queue_s = 2.0
    for _ in range(100):
        group.news.changed()
    assert await told(stream) == 2.0
    assert group.built == 2, "once for many changes"
    assert other.take() is None, "it was not asked for"


async def test_gateway_that_follows_no_more_is_told_nothing() -> None:
    group, stream, still = Group(), PulledStream(1), PulledStream(2)
    for each in (stream, still):
        group.news.follow(each, True)
        await told(each)
    group.news.follow(stream, False)
    group.queue_s = 2.0
    group.news.changed()
    assert await told(still) == 2.0
    assert stream.take() is None
    still.close()
    group.queue_s = 3.0
    group.news.follow(stream, True)
    assert await told(stream) == 3.0


async def test_outlook_travels_with_tokens_that_are_ready() -> None:
    group, ready = Group(), PulledStream(1)
    group.news.follow(ready, True)
    ready.push(common_pb2.TokenChunk(request_id="a"))
    message = ready.take()
    assert message is not None and message.HasField("outlook") and len(message.chunks) == 1
    assert ready.take() is None
