import itertools

import pytest

from balloond.node.events import Event
from balloond.policy.claims import ClaimPatience, ClaimSources, RoomAnswer, UsageReport, WantedExtents
from balloond.policy.device import DevicePolicy
from balloond.policy.kv_limits import Limit, LimitOutcome
from balloond.policy.ledger import Booking
from balloond.wire import messages
from protos import balloond_pb2, handoff_pb2
from services.errors import Invalid


def test_messages_kind_of_each_extent_number_is_known_and_others_are_refused():
    assert {messages.kind(number) for number in messages.KINDS.values()} == {"weights", "kv", "graphs"}
    with pytest.raises(Invalid, match="no kind 0"):
        messages.kind(0)


def test_messages_ages_in_a_report_become_times_of_last_use():
    message = handoff_pb2.Report(
        limit_revision=1,
        held_bytes=2,
        used_bytes=3,
        reserve_bytes=4,
        cached=[handoff_pb2.Cached(age_ms=1500, bytes=5)],
        reclaim_id=6,
        returned_bytes=7,
    )
    assert messages.report(message, 10.0) == UsageReport(10.0, 1, 2, 3, 4, ((8.5, 5),), 6, 7)


def test_messages_negative_age_of_a_prefix_counts_as_used_now():
    message = handoff_pb2.Report(cached=[handoff_pb2.Cached(age_ms=-1500, bytes=5)])
    assert messages.report(message, 10.0).cached == ((10.0, 5),)


def test_messages_of_limits_outcomes_rooms_and_events_keep_their_numbers():
    assert messages.handoff_limit(Limit(1, 2, 3), 4) == handoff_pb2.Limit(
        revision=1, bytes=2, deadline_ms=3, floor_bytes=4
    )
    assert messages.outcome(LimitOutcome("deferred", Limit(5, 10), 3, True), 13) == balloond_pb2.SetLimitResponse(
        state=balloond_pb2.DEFERRED, revision=5, held_bytes=13, overage_bytes=3
    )
    room = messages.room(RoomAnswer(1, 2, 3, (ClaimSources("m", "reserve", 4),)))
    assert (room.free_bytes, room.short_bytes, room.taken[0].model, room.taken[0].what) == (2, 3, "m", "reserve")
    event = messages.events([Event(1, 2.0, "d", "m", "w", "x")], 5.0).events[0]
    assert (event.sequence, event.age_s, event.device, event.detail) == (1, 3.0, "d", "x")


def test_messages_device_state_carries_all_of_the_ledger():
    device = DevicePolicy("cpu:0", 100, 1, itertools.count(1), itertools.count(1), ClaimPatience())
    device.book(0, "m", Booking(10, 20, 5))
    device.open("a", "m", "t")
    device.set_demand({"m": 2.5})
    device.grow(0, "a", 1, WantedExtents("kv", 4, 5))
    device.grow(0, "a", 2, WantedExtents("weights", 8, 1))
    device.report(0, "a", UsageReport(used=8, reserve=4, cached=((0.0, 3), (1.0, 5))))
    device.set_limit(0, "m", 15, 0, 0)
    state = messages.node("n", 7, [device], lambda lease: 42)
    (told,) = state.devices
    assert (state.node, state.revision, told.device, told.page_bytes) == ("n", 7, "cpu:0", 1)
    assert (told.capacity_bytes, told.leased_bytes, told.free_bytes, told.booked_bytes) == (100, 28, 62, 10)
    (lease,) = told.leases
    assert (lease.lease_id, lease.pid, lease.kv_bytes, lease.weights_bytes, lease.extents) == ("a", 42, 20, 8, 6)
    assert (lease.kv_used_bytes, lease.kv_reserve_bytes, lease.kv_cached_bytes, lease.overage_bytes) == (8, 4, 8, 5)
    (booking,) = told.bookings
    assert (booking.quota_bytes, booking.weights_bytes, booking.floor_bytes) == (10, 20, 5)
    assert (booking.limit_bytes, booking.limit_revision, booking.demand_weight) == (15, 1, 2.5)


@pytest.mark.parametrize("wrong", [{"held_bytes": -1}, {"used_bytes": 1 << 60}, {"cached": [{"bytes": -5}]}])
def test_messages_report_with_impossible_numbers_is_refused(wrong):
    with pytest.raises(Invalid, match="makes no sense"):
        messages.report(handoff_pb2.Report(**wrong), now=1.0)


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_messages_booking_with_an_empty_or_too_long_name_is_refused(name):
    with pytest.raises(Invalid, match="characters"):
        messages.booking(balloond_pb2.SetBookingRequest(device="cpu:0", model=name))


def test_messages_shortage_beyond_64_bits_is_sent_as_the_largest_number():
    assert messages.room(RoomAnswer(1, 0, 1 << 64, ())).short_bytes == (1 << 63) - 1
