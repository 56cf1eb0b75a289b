import os
import subprocess
import sys

import pytest

from balloond.keeper.keeper import Keeper
from protos import keeper_pb2
from services.ipc import seqpacket
from testing import descriptors
from tests.balloond.conftest import ROOT, TIMEOUT_S


def record(id, owner="o", descriptor=True, detail=b""):
    return keeper_pb2.Record(id=id, owner=owner, has_descriptor=descriptor, detail=detail)


def memfd(content):
    fd = os.memfd_create("x")
    os.write(fd, content)
    return fd


def open_descriptors():
    return descriptors.held("/memfd:x")


def listed(keeper, owner="", with_descriptors=True):
    found = {}
    for records, fds in keeper.list(owner, with_descriptors):
        arrived = iter(fds)
        for r in records.records:
            found[r.id] = os.pread(next(arrived), 9, 0) if r.has_descriptor else None
    return found


def test_keeper_records_are_listed_with_descriptors_by_owner():
    keeper = Keeper()
    keeper.keep([record("a"), record("b", descriptor=False), record("c", owner="p")], [memfd(b"A"), memfd(b"C")])
    assert listed(keeper) == {"a": b"A", "b": None, "c": b"C"}
    assert listed(keeper, "p") == {"c": b"C"}
    assert listed(keeper, with_descriptors=False) == {"a": None, "b": None, "c": None}
    keeper.forget("abc")


def test_keeping_a_known_id_again_replaces_it_and_closes_the_older_descriptor():
    before = open_descriptors()
    keeper = Keeper()
    keeper.keep([record("a")], [memfd(b"old")])
    keeper.keep([record("a")], [memfd(b"new")])
    assert listed(keeper) == {"a": b"new"}
    assert open_descriptors() == before + 1
    keeper.forget(["a", "unknown"])
    assert open_descriptors() == before


def test_keeper_update_changes_the_record_and_leaves_the_descriptor():
    keeper = Keeper()
    keeper.keep([record("a")], [memfd(b"A")])
    keeper.update([record("a", detail=b"more", descriptor=False)])
    ((records, fds),) = keeper.list("", True)
    assert (records.records[0].detail, os.pread(fds[0], 1, 0)) == (b"more", b"A")
    with pytest.raises(ValueError, match="unknown: z"):
        keeper.update([record("z")])
    keeper.forget(["a"])


def test_descriptors_that_do_not_match_their_records_are_closed():
    before = open_descriptors()
    keeper = Keeper()
    with pytest.raises(ValueError, match="1 descriptors for 2 records"):
        keeper.keep([record("a"), record("b")], [memfd(b"A")])
    assert (listed(keeper), open_descriptors()) == ({}, before)


def test_keeper_long_list_comes_in_several_messages_the_last_one_marked():
    keeper = Keeper()
    keeper.keep([record(f"r{i}", descriptor=False, detail=bytes(1000)) for i in range(300)], [])
    messages = [records for records, _ in keeper.list("", True)]
    assert len(messages) > 1
    assert [records.last for records in messages] == [False] * (len(messages) - 1) + [True]
    assert sum(len(records.records) for records in messages) == 300
    assert all(records.ByteSize() < seqpacket.MAX_BYTES for records in messages)


# --- the process


@pytest.fixture
def keeper(tmp_path):
    path = str(tmp_path / "k.sock")
    process = subprocess.Popen([sys.executable, "-m", "balloond.keeper", "--socket", path], cwd=ROOT)
    while True:
        try:
            seqpacket.connect(path).close()
            break
        except OSError:
            assert process.poll() is None
    yield path
    process.kill()
    process.wait()


def ask(sock, fds=(), **message):
    seqpacket.send(sock, keeper_pb2.ToKeeper(request_id=1, **message).SerializeToString(), fds)
    answer, fds = seqpacket.recv(sock)
    return keeper_pb2.FromKeeper.FromString(answer), fds


def test_the_memory_of_a_dead_owner_is_listed_to_its_successor(keeper):
    with seqpacket.connect(keeper, TIMEOUT_S) as first:
        fd = memfd(b"content")
        answer, _ = ask(first, [fd], keep=keeper_pb2.Keep(records=[record("extent/1")]))
        assert answer.WhichOneof("message") == "kept"
        os.close(fd)
    with seqpacket.connect(keeper, TIMEOUT_S) as second:
        answer, fds = ask(second, list=keeper_pb2.List(owner="o", with_descriptors=True))
        assert [r.id for r in answer.records.records] == ["extent/1"]
        assert os.pread(fds[0], 9, 0) == b"content"
        os.close(fds[0])


def test_keeper_closes_only_the_connection_that_sent_nonsense(keeper):
    with seqpacket.connect(keeper, TIMEOUT_S) as bad, seqpacket.connect(keeper, TIMEOUT_S) as good:
        fd = memfd(b"x")
        seqpacket.send(bad, b"\xff\xff\xff nonsense", [fd] * 5)
        assert seqpacket.recv(bad) == (b"", [])
        answer, _ = ask(good, [fd], list=keeper_pb2.List())
        assert answer.records.last
        answer, _ = ask(good, [fd], keep=keeper_pb2.Keep(records=[record("a"), record("b")]))
        assert answer.error.reason == "1 descriptors for 2 records"
        answer, _ = ask(good)
        assert answer.error.reason == "no such request"
        os.close(fd)


def test_keeper_on_a_socket_in_use_ends_with_one_line(keeper):
    second = subprocess.run(
        [sys.executable, "-m", "balloond.keeper", "--socket", keeper], cwd=ROOT, capture_output=True, text=True
    )
    assert second.returncode == 1
    assert second.stderr == f"keeper: {keeper}: another process serves it\n"


def test_a_record_that_could_not_be_listed_is_not_kept():
    before = open_descriptors()
    keeper = Keeper()
    with pytest.raises(ValueError, match="cannot be listed"):
        keeper.keep([record("a"), record("b", detail=bytes(seqpacket.MAX_BYTES - 50))], [memfd(b"A"), memfd(b"B")])
    keeper.keep([record("a", descriptor=False)], [])
    with pytest.raises(ValueError, match="cannot be listed"):
        keeper.update([record("a", detail=bytes(seqpacket.MAX_BYTES))])
    assert listed(keeper) == {"a": None}
    assert open_descriptors() == before
