import asyncio
import errno
import os
import socket
import subprocess
import sys

import pytest

from services.errors import Unavailable
from services.ipc import seqpacket
from testing import descriptors
from testing.patience import PATIENCE_S


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "s.sock")


async def test_seqpacket_messages_and_descriptors_arrive_together(path):
    got = asyncio.get_running_loop().create_future()

    async def on_connect(connection):
        message, fds = await connection.recv()
        got.set_result((message, [os.pread(fd, 5, 0) for fd in fds]))
        for fd in fds:
            os.close(fd)
        connection.send(b"thanks")
        await connection.recv()

    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    there = await seqpacket.connect_async(path)
    fds = []
    for i in range(seqpacket.MAX_DESCRIPTORS):
        fd = os.memfd_create("x")
        os.write(fd, b"%05d" % i)
        fds.append(fd)
    there.send(b"hello", fds)
    assert await got == (b"hello", [b"%05d" % i for i in range(seqpacket.MAX_DESCRIPTORS)])
    assert await there.recv() == (b"thanks", [])
    for fd in fds:
        os.close(fd)
    there.close()
    await server.stop()


async def test_seqpacket_messages_beyond_the_socket_buffer_are_sent_later_in_order(path):
    received = []
    done = asyncio.Event()
    go = asyncio.Event()

    async def on_connect(connection):
        await go.wait()
        while (got := await connection.recv()) is not None:
            received.append(int(got[0][:8]))
            for fd in got[1]:
                os.close(fd)
        done.set()

    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    there = await seqpacket.connect_async(path)
    fd = os.memfd_create("x")
    for i in range(500):
        there.send(b"%08d" % i + bytes(10_000), [fd])
    os.close(fd)  # what waits has its own duplicate
    go.set()
    while there._outgoing:
        await asyncio.sleep(0)
    there.close()
    await done.wait()
    assert received == list(range(500))
    await server.stop()


async def test_a_stale_socket_file_is_replaced_and_a_live_one_refused_in_one_line(path):
    with seqpacket.new() as dead:
        dead.bind(path)
    server = seqpacket.SeqpacketServer(path, None)
    server.start()
    with pytest.raises(Unavailable, match="another process serves it"):
        seqpacket.listen(path)
    await server.stop()
    assert not os.path.exists(path)


def test_seqpacket_listen_on_a_file_that_is_no_socket_is_refused(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(Unavailable, match="is not a socket"):
        seqpacket.listen(str(path))
    assert path.read_text() == "data"


def test_seqpacket_peer_has_the_pid_and_uid_that_the_kernel_reports():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer = seqpacket.peer(here)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    os.close(peer.pidfd)
    there.close()


async def test_the_pidfd_of_a_peer_becomes_readable_when_it_dies(path):
    known = asyncio.get_running_loop().create_future()

    async def on_connect(connection):
        known.set_result(seqpacket.peer(connection.sock))
        await connection.recv()

    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    code = f"import socket, sys; s = socket.socket(1, socket.SOCK_SEQPACKET); s.connect({path!r}); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    peer = await known
    assert peer.pid == child.pid
    dead = asyncio.Event()
    asyncio.get_running_loop().add_reader(peer.pidfd, dead.set)
    child.kill()
    await dead.wait()
    asyncio.get_running_loop().remove_reader(peer.pidfd)
    child.wait()
    os.close(peer.pidfd)
    await server.stop()


async def test_seqpacket_server_holds_one_answer_for_a_peer_that_does_not_read(path):
    """Without a pause between requests each of them would take descriptors that the peer never takes."""
    waits, gone = asyncio.Event(), asyncio.Event()
    fd = os.memfd_create("x")

    async def on_connect(connection):
        while await connection.recv() is not None:
            for _ in range(10):
                connection.send(bytes(seqpacket.MAX_BYTES), [fd])
            waits.set()
            await connection.drained()
        gone.set()

    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    there = seqpacket.connect(path)
    seqpacket.send(there, b"1")
    await waits.wait()
    before = descriptors.held("/memfd:x")
    for _ in range(20):
        seqpacket.send(there, b"again")
    for _ in range(50):
        await asyncio.sleep(0)
    assert descriptors.held("/memfd:x") == before
    there.close()
    await gone.wait()
    assert descriptors.held("/memfd:x") < before
    os.close(fd)
    await server.stop()


async def test_seqpacket_peer_that_connects_while_descriptors_are_short_is_accepted_later(path, monkeypatch):
    taken, refused = asyncio.Event(), asyncio.Event()

    async def on_connect(_connection):
        taken.set()

    class Short(socket.socket):
        """Has none for the first time."""

        def accept(self):
            if not refused.is_set():
                refused.set()
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    monkeypatch.setattr(seqpacket, "new", lambda: Short(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    server = seqpacket.SeqpacketServer(path, on_connect)
    server.start()
    there = seqpacket.connect(path)
    async with asyncio.timeout(PATIENCE_S):
        await taken.wait()
    assert refused.is_set()
    there.close()
    await server.stop()
