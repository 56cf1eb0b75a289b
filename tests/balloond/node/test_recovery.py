import os

from balloond.node import records, recovery
from balloond.node.processes import ProcessIdentity
from balloond.node.records import BookingFacts, BorrowFacts, ExtentFacts, LeaseFacts
from balloond.policy.ledger import Booking
from protos import keeper_pb2

LEASE = LeaseFacts("a", "cpu:0", "m", "token", ProcessIdentity(1, 2))


def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_recovery_sorts_records_of_a_predecessor_by_their_kind():
    fd = os.memfd_create("x")
    booking = BookingFacts("cpu:0", "m", Booking(), 0, -1)
    borrow = BorrowFacts(ProcessIdentity(3, 4), "a", (17,))
    extent = ExtentFacts(17, "cpu:0", 4096, "weights", "token")
    found = recovery.sort(
        [(records.encode(facts), fd if facts is extent else -1) for facts in (extent, borrow, booking, LEASE)]
    )
    assert (found.bookings, found.leases, found.borrows) == ([booking], [LEASE], [borrow])
    assert found.extents == [(extent, fd)]
    assert (found.given_out("cpu:0"), found.given_out("cpu:1")) == (True, False)
    assert found.unusable == []
    os.close(fd)


def test_recovery_extents_without_a_lease_are_closed_and_forgotten():
    orphan, strange = os.memfd_create("x"), os.memfd_create("x")
    found = recovery.sort(
        [
            (records.encode(LEASE), -1),
            (records.encode(ExtentFacts(1, "cpu:0", 4096, "kv", "other token")), orphan),
            (records.encode(ExtentFacts(2, "cpu:0", 4096, "kv", "token")), -1),
            (keeper_pb2.Record(id="what?", kind="image"), strange),
        ]
    )
    assert sorted(found.unusable) == ["extent/1", "extent/2", "what?"]
    assert found.extents == []
    assert not is_open(orphan) and not is_open(strange)
