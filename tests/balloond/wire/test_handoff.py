"""The handoff socket as its peers see it, message by message."""

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from protos import handoff_pb2
from services.ipc import seqpacket
from tests.balloond.child import EXTENT
from tests.balloond.conftest import MIB, ROOT, TIMEOUT_S, Node


class Peer:
    """One connection of this process."""

    def __init__(self, path):
        self.sock = seqpacket.connect(path, TIMEOUT_S)
        self.sock.settimeout(TIMEOUT_S)

    def send(self, **message):
        seqpacket.send(self.sock, handoff_pb2.ToBalloond(**message).SerializeToString())

    def recv(self):
        """(kind, message, descriptors); ("", None, []) at the end."""
        message, fds = seqpacket.recv(self.sock)
        if not message:
            return "", None, []
        decoded = handoff_pb2.FromBalloond.FromString(message)
        kind = decoded.WhichOneof("message")
        return kind, getattr(decoded, kind), fds

    def expect(self, kind):
        """The next message of this kind."""
        while True:
            got, message, fds = self.recv()
            if got == kind:
                return message, fds
            assert got, f"closed while waiting for {kind}"

    def attach(self, **attach):
        self.send(attach=handoff_pb2.Attach(**attach))
        return self.recv()


@pytest.fixture
def connect(shared):
    peers = []

    def new():
        peers.append(Peer(shared.handoff))
        return peers[-1]

    yield new
    for peer in peers:
        peer.sock.close()


ENGINE, LOADER = handoff_pb2.Attach.ENGINE, handoff_pb2.Attach.LOADER


def grow(count, kind=handoff_pb2.KV, nbytes=64 << 10, **more):
    return handoff_pb2.Grow(request_id=1, kind=kind, bytes=nbytes, count=count, **more)


def close_all(fds):
    for fd in fds:
        os.close(fd)


async def test_a_lease_without_a_booking_or_device_is_refused_and_the_connection_closed(shared, connect):
    peer = connect()
    kind, refused, _ = peer.attach(role=ENGINE, device=shared.name, model="nobody")
    assert (kind, refused.why, refused.detail) == ("refused", handoff_pb2.Refused.NOT_BOOKED, "nobody has no booking")
    assert peer.recv()[0] == ""
    kind, refused, _ = connect().attach(role=ENGINE, device="gpu:9", model="nobody")
    assert (kind, refused.why) == ("refused", handoff_pb2.Refused.UNKNOWN)


async def test_a_large_grant_comes_in_several_datagrams_the_last_one_marked(shared, connect):
    await shared.book("a")
    peer = connect()
    kind, attached, _ = peer.attach(role=ENGINE, device=shared.name, model="a")
    assert (kind, attached.page_bytes, attached.limit.bytes) == ("attached", 64 << 10, 16 * MIB)
    peer.send(grow=grow(256))
    parts = [peer.expect("granted")]
    while not parts[-1][0].last:
        parts.append(peer.expect("granted"))
    assert len(parts) > 1
    assert all(len(granted.extents) == len(fds) <= seqpacket.MAX_DESCRIPTORS for granted, fds in parts)
    assert len({extent.id for granted, _ in parts for extent in granted.extents}) == 256
    descriptors = [fd for _, fds in parts for fd in fds]
    assert all(os.fstat(fd).st_size == 64 << 10 for fd in descriptors)
    close_all(descriptors)


async def test_handoff_extent_granted_to_another_lease_is_new_memory(shared, connect):
    await shared.book("a", "b")
    peers = []
    for model in "ab":
        peer = connect()
        peer.attach(role=ENGINE, device=shared.name, model=model)
        peers.append(peer)
    one, other = peers
    one.send(grow=grow(1, nbytes=16 * MIB))
    granted, (fd,) = one.expect("granted")
    os.pwrite(fd, b"secret", 0)
    one.send(**{"return": handoff_pb2.Return(extent_ids=[granted.extents[0].id])})
    other.send(grow=grow(1, nbytes=16 * MIB))
    again, (new,) = other.expect("granted")
    assert again.extents[0].id != granted.extents[0].id
    assert os.pread(new, 6, 0) == bytes(6)
    assert os.fstat(new).st_ino != os.fstat(fd).st_ino
    close_all([fd, new])


async def test_handoff_closed_socket_suspends_the_lease_and_its_token_resumes_the_named_extents(shared, connect):
    await shared.book("a")
    peer = connect()
    _, attached, _ = peer.attach(role=ENGINE, device=shared.name, model="a")
    peer.send(grow=grow(4))
    granted, fds = peer.expect("granted")
    peer.sock.close()
    device = await shared.until(lambda device: any(lease.suspended for lease in device.leases))
    assert device.leased_bytes == 4 * (64 << 10)
    held = list(granted.extents)
    peer = connect()
    # In two messages, as a long list comes; two of the four extents are not named.
    peer.send(
        attach=handoff_pb2.Attach(
            role=ENGINE, device=shared.name, model="a", token=attached.token, held=held[:1], more=True
        )
    )
    _, again, _ = peer.attach(role=ENGINE, token=attached.token, held=held[1:2])
    assert (again.lease_id, again.token) == (attached.lease_id, attached.token)
    device = await shared.until(lambda device: not any(lease.suspended for lease in device.leases))
    assert device.leased_bytes == 2 * (64 << 10)
    close_all(fds)


async def test_handoff_second_connection_with_the_token_replaces_the_first(shared, connect):
    await shared.book("a")
    first = connect()
    _, attached, _ = first.attach(role=ENGINE, device=shared.name, model="a")
    second = connect()
    second.attach(role=ENGINE, device=shared.name, model="a", token=attached.token)
    assert first.recv()[0] == ""
    second.send(grow=grow(1))
    _, fds = second.expect("granted")
    assert [lease.suspended for lease in (await shared.device()).leases] == [False]
    close_all(fds)


async def test_handoff_lease_whose_attached_message_was_lost_ends(shared, connect):
    await shared.book("a")
    peer = connect()
    peer.attach(role=ENGINE, device=shared.name, model="a")
    peer.sock.close()
    await shared.until(lambda device: not device.leases)
    async with shared.client() as client:
        await client.drop_booking(shared.name, "a")  # no lease of a process that lives and knows nothing of it


async def test_handoff_peer_that_read_attached_before_its_socket_closed_keeps_its_lease(shared, connect):
    await shared.book("a")
    peer = connect()
    _, attached, _ = peer.attach(role=ENGINE, device=shared.name, model="a")
    peer.sock.close()
    await shared.until(lambda device: not device.leases)
    again = connect()
    kind, _, _ = again.attach(role=ENGINE, device=shared.name, model="a", token=attached.token)
    assert kind == "attached"
    again.send(grow=grow(1))
    _, fds = again.expect("granted")
    assert [lease.suspended for lease in (await shared.device()).leases] == [False]
    close_all(fds)


async def test_handoff_peer_that_attaches_while_descriptors_are_short_leaves_no_lease(node):
    """A connection takes one, a look at its process another, and the watch for its death two at a time."""
    await node.book("a")
    pid = node.balloond.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    told = []
    for free in range(1, 7):
        used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        unused = [number for number in range(len(used) + free) if number not in used]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (unused[free - 1] + 1, before[1]))
        peer = Peer(node.handoff)
        kind, _, _ = peer.attach(role=ENGINE, device=node.name, model="a")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        if kind == "attached":
            peer.send(detach=handoff_pb2.Detach())
            peer.expect("detached")
        told.append(kind)
        peer.sock.close()
    assert told[0] == "refused" and told[-1] == "attached", told
    assert not (await node.device()).leases
    async with node.client() as client:
        await client.drop_booking(node.name, "a")


@pytest.mark.parametrize("message", [b"\xff\xff\xff", b"", handoff_pb2.ToBalloond(grow=grow(1)).SerializeToString()])
async def test_handoff_peer_with_an_unknown_message_is_dropped(shared, connect, message):
    peer = connect()
    seqpacket.send(peer.sock, message)
    assert peer.recv()[0] == ""


async def test_handoff_growth_of_an_unknown_kind_drops_only_its_peer(shared, connect):
    await shared.book("a")
    peer = connect()
    peer.attach(role=ENGINE, device=shared.name, model="a")
    peer.send(grow=grow(1, kind=0))
    refused, _ = peer.expect("refused")
    assert refused.detail == "no kind 0 of extents"
    assert peer.recv()[0] == ""
    await shared.until(lambda device: any(lease.suspended for lease in device.leases))


_SETRESUID = {"x86_64": 117, "aarch64": 147}
_NOBODY = 65534


@pytest.mark.parametrize("wrong", [{"bytes": -4096}, {"bytes": 1}, {"bytes": 1 << 62}])
async def test_handoff_held_extents_of_impossible_size_are_refused_and_not_stranded(shared, connect, wrong):
    held = [handoff_pb2.Extent(id=5, kind=handoff_pb2.KV, **wrong)]
    kind, refused, _ = connect().attach(role=ENGINE, device=shared.name, model="m", token="made-up", held=held)
    assert kind == "refused" and "not whole pages" in refused.detail
    device = await shared.device()
    assert (device.stranded_bytes, len(device.leases)) == (0, 0)


async def test_handoff_report_with_impossible_numbers_drops_the_peer_and_changes_no_state(shared, connect):
    await shared.book("m")
    peer = connect()
    peer.attach(role=ENGINE, device=shared.name, model="m")
    peer.send(report=handoff_pb2.Report(held_bytes=-1, cached=[handoff_pb2.Cached(bytes=(1 << 63) - 1)] * 2))
    assert "makes no sense" in peer.expect("refused")[0].detail
    device = await shared.until(lambda device: all(lease.suspended for lease in device.leases))
    assert device.leases[0].kv_cached_bytes == 0


async def test_handoff_growth_beyond_64_bits_is_refused_with_the_largest_number(shared, connect):
    await shared.book("m")
    peer = connect()
    peer.attach(role=ENGINE, device=shared.name, model="m")
    peer.send(grow=grow(2**31 - 1, nbytes=1 << 62))
    refused, _ = peer.expect("refused")
    assert refused.short_bytes == (1 << 63) - 1


@pytest.mark.skipif(os.getuid() != 0 or os.uname().machine not in _SETRESUID, reason="only root can be somebody else")
def test_a_peer_of_another_user_is_refused_in_one_line():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        node = Node(Path(folder))
        got = []

        def somebody_else():
            # The system call itself changes this thread alone; the C library's function would change them all.
            ctypes.CDLL(None).syscall(_SETRESUID[os.uname().machine], _NOBODY, _NOBODY, _NOBODY)
            got.append(Peer(node.handoff).attach(role=ENGINE, device="cpu:0", model="a")[1])

        try:
            asyncio.run(node.start())
            os.chmod(node.handoff, 0o777)
            thread = threading.Thread(target=somebody_else)
            thread.start()
            thread.join(TIMEOUT_S)
        finally:
            node.end()
    assert got[0].why == handoff_pb2.Refused.PEER
    assert got[0].detail == f"process {os.getpid()} belongs to user {_NOBODY}, balloond to 0"


# --- loaders


async def borrowed(peer, lease_id):
    peer.send(borrow=handoff_pb2.Borrow(request_id=9, lease_id=lease_id))
    return await asyncio.to_thread(peer.expect, "granted")


async def test_handoff_borrowed_extent_is_free_when_engine_and_loader_returned_it(shared, connect, child):
    await shared.book("a", weights=2 * MIB)
    one = child("a")
    one.ask("grow_weights", 2 * MIB)
    one.ask("fill_weights", 5)
    loader = connect()
    assert loader.attach(role=LOADER)[0] == "attached"
    granted, fds = await borrowed(loader, one.ask("lease_id"))
    assert [os.pread(fd, 1, 0) for fd in fds] == [b"\5", b"\5"]
    os.pwrite(fds[0], b"\7", 0)
    assert one.ask("weights_byte") == "7"
    one.ask("leave_weights")
    loader.send(**{"return": handoff_pb2.Return(lease_id=one.ask("lease_id"), extent_ids=[granted.extents[0].id])})
    device = await shared.until(lambda device: device.leased_bytes == MIB)
    assert device.leases[0].weights_bytes == MIB
    loader.send(**{"return": handoff_pb2.Return(lease_id=one.ask("lease_id"))})
    await shared.until(lambda device: device.leased_bytes == 0)
    close_all(fds)


async def test_handoff_kv_lent_beside_weights_is_returned_independently(shared, connect, child):
    await shared.book("a", weights=MIB)
    one = child("a")
    one.ask("grow_weights", MIB)
    one.ask("acquire", 2)
    lease_id = one.ask("lease_id")
    loader = connect()
    loader.attach(role=LOADER)
    weights, fds = await borrowed(loader, lease_id)
    ids = [int(id) for id in one.ask("kv_ids").split()]
    loader.send(borrow=handoff_pb2.Borrow(request_id=10, lease_id=lease_id, extent_ids=ids[:1]))
    kv, more = await asyncio.to_thread(loader.expect, "granted")
    assert [extent.id for extent in kv.extents] == ids[:1] and kv.extents[0].kind == handoff_pb2.KV
    loader.send(**{"return": handoff_pb2.Return(lease_id=lease_id, extent_ids=[e.id for e in weights.extents])})
    one.ask("leave_weights")
    await shared.until(lambda device: device.leases[0].weights_bytes == 0)
    one.kill()
    await shared.until(lambda device: device.leased_bytes == kv.extents[0].bytes)
    loader.send(**{"return": handoff_pb2.Return(lease_id=lease_id, extent_ids=ids[:1])})
    await shared.until(lambda device: device.leased_bytes == 0)
    close_all([*fds, *more])


async def test_handoff_borrow_of_a_missing_kv_extent_is_refused_by_its_number(shared, connect, child):
    await shared.book("a", weights=MIB)
    lease_id = child("a").ask("lease_id")
    loader = connect()
    loader.attach(role=LOADER)
    loader.send(borrow=handoff_pb2.Borrow(request_id=10, lease_id=lease_id, extent_ids=[12345]))
    refused, _ = await asyncio.to_thread(loader.expect, "refused")
    assert refused.detail == f"lease {lease_id} has no KV extent 12345"


async def test_borrowed_extents_outlive_their_engine_until_the_loader_returns_them(shared, connect, child):
    await shared.book("a", weights=2 * MIB)
    one = child("a")
    one.ask("grow_weights", 2 * MIB)
    one.ask("acquire", 3)
    lease_id = one.ask("lease_id")
    loader = connect()
    loader.attach(role=LOADER)
    _, fds = await borrowed(loader, lease_id)
    one.kill()
    device = await shared.until(lambda device: device.leased_bytes == 2 * MIB)
    assert [lease.lease_id for lease in device.leases] == [lease_id]
    loader.sock.close()
    again = connect()
    again.attach(role=LOADER)
    again.send(**{"return": handoff_pb2.Return(lease_id=lease_id)})
    device = await shared.until(lambda device: device.leased_bytes == 0)
    assert device.leases == []
    close_all(fds)


async def test_handoff_borrow_of_more_extents_than_a_keeper_record_holds_is_refused(shared, connect, child):
    await shared.book("a")
    lease_id = child("a").ask("lease_id")
    loader = connect()
    loader.attach(role=LOADER)
    loader.send(borrow=handoff_pb2.Borrow(request_id=9, lease_id=lease_id, extent_ids=range(6001)))
    refused, _ = loader.expect("refused")
    assert "no more than 6000 extents" in refused.detail


async def test_handoff_borrow_from_an_unknown_lease_is_refused(shared, connect):
    loader = connect()
    loader.attach(role=LOADER)
    loader.send(borrow=handoff_pb2.Borrow(request_id=9, lease_id="nobody"))
    refused, _ = loader.expect("refused")
    assert (refused.request_id, refused.why) == (9, handoff_pb2.Refused.UNKNOWN)


async def lent_to_a_loader(node, child):
    """A process with weights, its lease, and the descriptors that a loader has borrowed of it."""
    await node.book("a", weights=2 * MIB)
    one = child("a")
    one.ask("grow_weights", 2 * MIB)
    lease_id = one.ask("lease_id")
    loader = Peer(node.handoff)
    loader.attach(role=LOADER)
    _, fds = await borrowed(loader, lease_id)
    return one, lease_id, fds


async def test_handoff_borrow_survives_a_restart_of_balloond(node, child):
    one, lease_id, fds = await lent_to_a_loader(node, child)
    node.kill(node.balloond)
    one.kill()
    await node.start_balloond()
    device = await node.device()
    assert [lease.weights_bytes for lease in device.leases] == [2 * MIB]
    loader = Peer(node.handoff)
    loader.attach(role=LOADER)
    loader.send(**{"return": handoff_pb2.Return(lease_id=lease_id)})
    await node.until(lambda device: device.free_bytes == 16 * MIB)
    close_all(fds)


async def test_handoff_lease_that_ended_while_borrowed_stays_ended_in_the_next_balloond(node, child):
    one, lease_id, fds = await lent_to_a_loader(node, child)
    one.ask("detach")  # its process lives on
    await node.until(lambda device: not any(lease.pid for lease in device.leases))
    node.kill(node.balloond)
    await node.start_balloond()
    assert (await node.device()).leased_bytes == 2 * MIB
    loader = Peer(node.handoff)
    loader.attach(role=LOADER)
    loader.send(**{"return": handoff_pb2.Return(lease_id=lease_id)})
    device = await node.until(lambda device: device.leased_bytes == 0)
    assert device.leases == []
    async with node.client() as client:
        await client.drop_booking(node.name, "a")
    close_all(fds)


BORROWER = """
import sys
from protos import handoff_pb2
from services.ipc import seqpacket
sock = seqpacket.connect(sys.argv[1], 10)
def send(**message):
    seqpacket.send(sock, handoff_pb2.ToBalloond(**message).SerializeToString())
send(attach=handoff_pb2.Attach(role=handoff_pb2.Attach.LOADER))
seqpacket.recv(sock)
print("attached", flush=True)
sys.stdin.readline()
send(borrow=handoff_pb2.Borrow(request_id=1, lease_id=sys.argv[2]))
print("sent", flush=True)
sys.stdin.readline()
"""


async def test_handoff_extents_requested_by_a_loader_that_died_are_not_lent(node, child):
    """Its death may be seen before its last message."""
    await node.book("a", weights=2 * MIB)
    one = child("a")
    one.ask("grow_weights", 2 * MIB)
    command = [sys.executable, "-c", BORROWER, node.handoff, one.ask("lease_id")]
    loaders = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(6)
    ]
    for loader in loaders:
        assert await asyncio.to_thread(loader.stdout.readline) == "attached\n"
    node.balloond.send_signal(signal.SIGSTOP)
    for loader in loaders:
        print(file=loader.stdin, flush=True)
        assert await asyncio.to_thread(loader.stdout.readline) == "sent\n"
        loader.kill()
        loader.communicate()
    node.balloond.send_signal(signal.SIGCONT)
    await node.device()
    one.ask("detach")
    device = await node.until(lambda device: device.leased_bytes == 0)
    assert device.leases == []


def test_child_extent_is_256_kib():
    assert EXTENT == 256 << 10
