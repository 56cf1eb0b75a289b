from __future__ import annotations

import os
import socket

from gpu_scheduler.engines.sglang.ranks.channel import Channel
from protos import engine_pb2
from services.ipc.framing import BlockingChannel


def test_channel_receives_the_messages_that_are_there_and_only_wait_blocks() -> None:
    ours, theirs = socket.socketpair()
    parent, channel = BlockingChannel(ours.detach(), engine_pb2.FromEngine), Channel(theirs.detach())
    assert channel.receive() == [] and not channel.wait(0.0)
    for number in (1, 2):
        parent.send(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id=str(number))))
    assert channel.wait(None)
    assert [message.abort.request_id for message in channel.receive()] == ["1", "2"]
    channel.send(parked=engine_pb2.Parked(request_id="x"))
    assert [message.parked.request_id for message in parent.recv_ready()] == ["x"]


def test_messages_put_back_come_first_and_end_the_wait() -> None:
    ours, theirs = socket.socketpair()
    parent, channel = BlockingChannel(ours.detach(), engine_pb2.FromEngine), Channel(theirs.detach())
    for number in (1, 2, 3):
        parent.send(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id=str(number))))
    assert channel.wait(None)
    channel.unread(channel.receive()[1:])
    parent.send(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id="4")))
    assert channel.wait(None)
    assert [message.abort.request_id for message in channel.receive()] == ["2", "3", "4"]
    assert not channel.wait(0.0)


def test_channel_wait_ends_when_another_descriptor_is_ready() -> None:
    ours, theirs = socket.socketpair()
    channel, event = Channel(theirs.detach()), os.eventfd(1)
    assert channel.wait(None, [event])
    assert channel.receive() == [] and not channel.closed
    os.close(event)
    ours.close()


def test_the_parents_death_ends_the_wait_and_closes_the_channel() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs.detach())
    ours.close()
    assert channel.wait(None)
    assert channel.receive() == [] and channel.closed
