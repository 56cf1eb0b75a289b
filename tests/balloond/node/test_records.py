import pytest

from balloond.node import records
from balloond.node.processes import ProcessIdentity
from balloond.node.records import BookingFacts, BorrowFacts, ExtentFacts, LeaseFacts
from balloond.policy.ledger import Booking
from protos import keeper_pb2

FACTS = [
    LeaseFacts("ab", "cpu:0", "some/model", "token", ProcessIdentity(7, 99)),
    ExtentFacts(12, "cpu:0", 4096, "kv", "token"),
    ExtentFacts(13, "cpu:1", 8192, "weights", "token"),
    ExtentFacts(14, "cpu:1", 8192, "graphs", "token"),
    BookingFacts("cpu:0", "some/model", Booking(1, 2, 3), 4, -1),
    BorrowFacts(ProcessIdentity(7, 99), "ab", (12, 13)),
]


@pytest.mark.parametrize("facts", FACTS, ids=lambda facts: type(facts).__name__)
def test_records_decode_to_the_facts_they_encode(facts):
    record = keeper_pb2.Record.FromString(records.encode(facts).SerializeToString())
    assert record.owner == records.OWNER
    assert record.has_descriptor == isinstance(facts, ExtentFacts)
    assert records.decode(record) == facts


def test_record_ids_differ_between_facts():
    ids = [records.encode(facts).id for facts in FACTS]
    assert ids == ["lease/ab", "extent/12", "extent/13", "extent/14", "booking/cpu:0/some/model", "borrow/7-99/ab"]


@pytest.mark.parametrize(
    "record",
    [
        keeper_pb2.Record(id="image/m", kind="image"),
        keeper_pb2.Record(id="lease/x", kind="lease", detail=b"{}"),
        keeper_pb2.Record(id="lease/x", kind="lease", detail=b"not json"),
        keeper_pb2.Record(id="extent/x", kind="kv"),
    ],
)
def test_record_of_an_unknown_kind_or_detail_is_a_value_error(record):
    with pytest.raises(ValueError):
        records.decode(record)
