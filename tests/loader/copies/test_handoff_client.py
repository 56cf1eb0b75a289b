"""The loader's end of the handoff socket, against a balloond that does what the test says."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from loader.copies.handoff_client import HandoffClient
from protos import handoff_pb2
from services.errors import NotFound, Unavailable, Unmet
from services.ipc import seqpacket
from services.runtime import tasks
from testing.patience import PATIENCE_S


class Script:
    """A balloond: what it received, in order, and what the test makes it send."""

    def __init__(self, path):
        self.server = seqpacket.SeqpacketServer(path, self.serve)
        self.received: asyncio.Queue[handoff_pb2.ToBalloond] = asyncio.Queue()
        self.connection = None

    async def serve(self, connection):
        self.connection = connection
        while (message := await connection.recv()) is not None:
            request = handoff_pb2.ToBalloond.FromString(message[0])
            if request.HasField("attach"):
                assert request.attach.role == handoff_pb2.Attach.LOADER
                self.send(attached=handoff_pb2.Attached())
            else:
                self.received.put_nowait(request)

    def send(self, fds=(), **message):
        self.connection.send(handoff_pb2.FromBalloond(**message).SerializeToString(), fds)

    async def next(self):
        async with asyncio.timeout(PATIENCE_S):
            return await self.received.get()

    async def borrow(self, lease_id):
        request = await self.next()
        assert request.borrow.lease_id == lease_id, request
        return request.borrow.request_id

    def grant(self, request_id, *ids, last=True):
        fds = [os.memfd_create("extent") for _ in ids]
        extents = [handoff_pb2.Extent(id=id, bytes=4096, kind=handoff_pb2.WEIGHTS) for id in ids]
        self.send(fds, granted=handoff_pb2.Granted(request_id=request_id, extents=extents, last=last))
        for fd in fds:
            os.close(fd)

    def refuse(self, request_id, why, detail):
        self.send(refused=handoff_pb2.Refused(request_id=request_id, why=why, detail=detail))

    async def given_back(self):
        request = await self.next()
        given = getattr(request, "return")
        return given.lease_id, list(given.extent_ids)


@pytest.fixture
def path():
    folder = Path(tempfile.mkdtemp(prefix="prism-"))
    yield str(folder / "handoff.sock")
    shutil.rmtree(folder)


@pytest.fixture
async def balloond(path):
    script = Script(path)
    script.server.start()
    yield script
    await script.server.stop()


@pytest.fixture
async def client(path):
    client = HandoffClient(path, answer_timeout_s=PATIENCE_S)
    running = tasks.spawn(client.run(), "handoff")
    yield client
    await tasks.cancel(running)


class Borrower:
    """A borrowing that the test ends."""

    def __init__(self, client, lease_id="lease"):
        self.got = asyncio.get_running_loop().create_future()
        self.enough = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(client, lease_id))

    async def _run(self, client, lease_id):
        try:
            async with client.borrowed(lease_id) as extents:
                self.got.set_result([extent.id for extent in extents])
                for extent in extents:
                    os.fstat(extent.fd)
                await self.enough.wait()
        finally:
            self.got.cancel()

    async def end(self):
        self.enough.set()
        await self.task


async def test_extents_come_in_the_order_of_the_range_and_go_back_at_the_end(balloond, client):
    borrower = Borrower(client)
    request = await balloond.borrow("lease")
    balloond.grant(request, 7, 9, last=False)
    balloond.grant(request, 3, last=True)
    assert await borrower.got == [3, 7, 9]
    await borrower.end()
    lease, ids = await balloond.given_back()
    assert lease == "lease" and sorted(ids) == [3, 7, 9]


@pytest.mark.parametrize(("why", "error"), [("UNKNOWN", NotFound), ("PEER", Unmet)])
async def test_refused_borrow_raises_its_reason_and_returns_no_extents(balloond, client, why, error):
    borrower = Borrower(client)
    balloond.refuse(await balloond.borrow("lease"), handoff_pb2.Refused.Why.Value(why), "no such lease: 4")
    with pytest.raises(error, match="no such lease: 4"):
        await borrower.task
    assert balloond.received.empty()


async def test_different_leases_are_borrowed_side_by_side_and_one_lease_once_at_a_time(balloond, client):
    first, second, other = Borrower(client), Borrower(client), Borrower(client, "other")
    request, others = await balloond.borrow("lease"), await balloond.borrow("other")
    balloond.grant(others, 5)
    balloond.grant(request, 1)
    assert (await first.got, await other.got) == ([1], [5])
    assert balloond.received.empty()
    await first.end()
    assert await balloond.given_back() == ("lease", [1])
    balloond.grant(await balloond.borrow("lease"), 1)
    assert await second.got == [1]
    await asyncio.gather(second.end(), other.end())


async def test_extents_of_a_borrower_that_gave_up_return_before_the_lease_is_borrowed_again(balloond, client):
    first = Borrower(client)
    request = await balloond.borrow("lease")
    balloond.grant(request, 1, last=False)
    first.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first.task
    second = Borrower(client)
    await asyncio.sleep(0)
    assert balloond.received.empty()
    balloond.grant(request, 2)
    assert await balloond.given_back() == ("lease", [1, 2])
    balloond.grant(await balloond.borrow("lease"), 1, 2)
    assert await second.got == [1, 2]
    await second.end()


async def test_a_borrow_waits_for_a_balloond_that_is_not_there_yet(path, client):
    borrower = Borrower(client)
    await asyncio.sleep(0)
    balloond = Script(path)
    balloond.server.start()
    balloond.grant(await balloond.borrow("lease"), 1)
    assert await borrower.got == [1]
    await borrower.end()
    await balloond.server.stop()


async def test_borrow_unanswered_when_the_connection_breaks_is_sent_again_as_a_whole(balloond, client):
    borrower = Borrower(client)
    request = await balloond.borrow("lease")
    balloond.grant(request, 1, last=False)
    balloond.connection.close()
    again = await balloond.borrow("lease")
    balloond.grant(again, 1, 2)
    assert await borrower.got == [1, 2]
    await borrower.end()


async def test_borrowed_extents_outlive_the_connection_and_go_back_over_the_next(balloond, client):
    borrower = Borrower(client)
    balloond.grant(await balloond.borrow("lease"), 1)
    await borrower.got
    balloond.connection.close()
    other = Borrower(client, "other")
    await balloond.borrow("other")  # connected again: nothing of "lease" was given back meanwhile
    await borrower.end()
    assert await balloond.given_back() == ("lease", [1])
    other.task.cancel()


async def test_a_return_that_a_broken_connection_may_have_lost_is_sent_again(balloond, client):
    borrower = Borrower(client)
    balloond.grant(await balloond.borrow("lease"), 1)
    await borrower.got
    await borrower.end()
    assert await balloond.given_back() == ("lease", [1])
    balloond.connection.close()
    assert await balloond.given_back() == ("lease", [1])


async def test_a_return_is_not_sent_again_once_its_lease_is_borrowed_anew(balloond, client):
    for _ in range(2):
        borrower = Borrower(client)
        balloond.grant(await balloond.borrow("lease"), 1)
        await borrower.got
        if _ == 0:
            await borrower.end()
            await balloond.given_back()
    balloond.connection.close()
    other = Borrower(client, "other")
    await balloond.borrow("other")
    assert balloond.received.empty()
    await borrower.end()
    other.task.cancel()


async def test_a_balloond_that_does_not_answer_in_time_is_unavailable(balloond, path):
    client = HandoffClient(path, answer_timeout_s=0.05)
    running = tasks.spawn(client.run(), "handoff")
    with pytest.raises(Unavailable, match="does not answer"):
        async with client.borrowed("lease"):
            pass
    await tasks.cancel(running)
