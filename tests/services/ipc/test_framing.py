import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import engine_pb2
from services.ipc.framing import BlockingChannel, FramedChannel, _Unframe, frame


def failed(text):
    return engine_pb2.FromEngine(failed=engine_pb2.Failed(reason=text))


@given(st.lists(st.text(max_size=50), max_size=10), st.lists(st.integers(1, 40), max_size=60))
def test_framed_messages_arrive_whole_and_in_order_however_the_bytes_are_cut(texts, cuts):
    stream = b"".join(frame(failed(text)) for text in texts)
    unframe = _Unframe(engine_pb2.FromEngine)
    got = []
    for cut in cuts:
        got += unframe.feed(stream[:cut])
        stream = stream[cut:]
    got += unframe.feed(stream)
    assert [message.failed.reason for message in got] == texts


async def test_framed_channel_joins_a_blocking_and_an_asyncio_end():
    ours, theirs = socket.socketpair()
    channel = await FramedChannel(engine_pb2.FromEngine).open(ours)
    engine = BlockingChannel(theirs.detach(), engine_pb2.ToEngine)
    engine.send(failed("x" * 1_000_000))
    receiving = asyncio.get_running_loop().create_task(channel.recv())
    while not receiving.done():
        await asyncio.to_thread(engine.flush_ready)
    assert len((await receiving).failed.reason) == 1_000_000
    channel.send(engine_pb2.ToEngine(abort=engine_pb2.Abort(request_id="r")))
    while not (messages := engine.recv_ready()):
        await asyncio.sleep(0)
    assert messages[0].abort.request_id == "r"
    channel.close()
    while not engine.closed:
        await asyncio.sleep(0)
        assert engine.recv_ready() == []


async def test_framed_channel_ends_when_the_engine_closes_its_end():
    ours, theirs = socket.socketpair()
    channel = await FramedChannel(engine_pb2.FromEngine).open(ours)
    theirs.close()
    assert await channel.recv() is None


@pytest.mark.parametrize("nonsense", [b"\xff\xff\xff\xff", b"\x02\0\0\0\x0a\x7f"], ids=["too long", "no message"])
async def test_framed_channel_with_invalid_bytes_is_closed_without_an_error(nonsense, caplog):
    for blocking in (False, True):
        ours, theirs = socket.socketpair()
        theirs.sendall(nonsense)
        if blocking:
            engine = BlockingChannel(ours.detach(), engine_pb2.ToEngine)
            assert (engine.recv_ready(), engine.closed) == ([], True)
        else:
            channel = await FramedChannel(engine_pb2.FromEngine).open(ours)
            assert await channel.recv() is None
        theirs.close()
    assert not caplog.records
