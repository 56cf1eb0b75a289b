import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from balloond.policy.claims import (
    AskBack,
    ClaimPatience,
    Freed,
    Grant,
    LimitChanged,
    RefuseClaim,
    RoomAnswer,
    UsageReport,
    WantedExtents,
)
from balloond.policy.device import DevicePolicy
from balloond.policy.ledger import Booking
from services.errors import Invalid, NotFound, PrismError

PATIENCE = ClaimPatience(reclaim_s=2, shrink_s=5, grow_s=10)


def make(capacity=100):
    return DevicePolicy("cpu:0", capacity, 1, itertools.count(1), itertools.count(1), PATIENCE)


@pytest.fixture
def device():
    """Two models, with a lease each."""
    device = make()
    for model in "ab":
        device.book(0, model, Booking())
        device.open(model.upper(), model, model)
    return device


def told(device, decisions):
    """The decisions that leave the device, as one would say them; notes left out."""
    words = []
    for decision in decisions:
        match decision:
            case Grant(lease, _, extents):
                words.append(f"{lease} gets {sum(e.bytes for e in extents)}")
            case RefuseClaim(lease, _, why, short, _):
                words.append(f"{lease} refused: {why}, short {short}")
            case AskBack(lease, _, nbytes, deep):
                words.append(f"{lease} asked for {nbytes}{' deep' if deep else ''}")
            case LimitChanged(model):
                words.append(f"limit of {model} {device.limits.get(model).bytes}")
            case RoomAnswer(_, free, short, _):
                words.append(f"room {free}, short {short}")
            case Freed(extents):
                words.append(f"freed {sum(e.bytes for e in extents)}")
    device.ledger.check()
    return words


def grow(device, now, lease, count, nbytes=1, least=0, kind="kv", reserve=False, behind=0, cached=0):
    wanted = WantedExtents(kind, nbytes, count, least, reserve, behind, cached)
    return told(device, device.grow(now, lease, 1, wanted))


def some_kv(device, lease, nbytes):
    ids = [id for id, extent in device.ledger.leases[lease].extents.items() if extent.kind == "kv"]
    return ids[:nbytes]


def back(device, now, lease, nbytes):
    """`nbytes` of one-byte extents come back."""
    return told(device, device.give_back(now, lease, some_kv(device, lease, nbytes)))


def report(device, now, lease, answers=None, returned=0, **of_kv):
    ask = 0
    if answers is not None:
        ask = [a.id for a in device.reclaims.asks.values() if a.lease_id == lease][answers]
    return told(device, device.report(now, lease, UsageReport(at=now, reclaim_id=ask, returned=returned, **of_kv)))


# --- growth


def test_free_memory_is_granted_at_once(device):
    assert grow(device, 0, "A", 10, nbytes=4) == ["A gets 40"]
    assert device.ledger.free == 60


def test_a_growth_over_the_limit_is_refused_at_once_with_the_missing_bytes(device):
    device.set_limit(0, "a", 10, 0, 0)
    assert grow(device, 0, "A", 8) == ["A gets 8"]
    assert grow(device, 0, "A", 3) == ["A refused: over_limit, short 1"]
    assert grow(device, 0, "A", 3, least=1) == ["A gets 2"]
    assert grow(device, 0, "A", 3, kind="weights") == ["A gets 3"]


def test_device_growth_with_a_least_count_is_granted_in_part(device):
    grow(device, 0, "A", 95)
    assert grow(device, 0, "B", 10, least=3) == ["B gets 5"]


def test_device_growth_with_nothing_to_reclaim_is_refused_at_once_as_exhausted(device):
    grow(device, 0, "A", 95)
    assert grow(device, 0, "B", 10) == ["B refused: exhausted, short 5"]
    assert device.claims == []


def test_a_growth_in_broken_pages_or_without_a_booking_is_refused():
    device = DevicePolicy("cpu:0", 100, 10, itertools.count(), itertools.count(1), PATIENCE)
    device.book(0, "a", Booking())
    device.open("A", "a", "t")
    assert grow(device, 0, "A", 1, nbytes=15) == ["A refused: unknown, short 0"]
    with pytest.raises(NotFound):
        device.grow(0, "Z", 1, WantedExtents("kv", 10, 1))


def test_device_growth_reclaims_the_reserve_of_another_lease(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=80, reserve=20)
    assert grow(device, 1, "B", 15) == ["A asked for 15"]
    assert back(device, 1, "A", 15) == ["freed 15", "B gets 15"]
    assert report(device, 1, "A", answers=0, returned=15) == []
    assert device.reclaims.asks == {}


def test_device_growth_reclaims_prefixes_when_reserves_do_not_suffice(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", reserve=20, cached=((-5.0, 20),))
    assert grow(device, 1, "B", 30) == ["A asked for 20", "A asked for 10 deep"]


def test_device_growth_with_older_own_prefixes_is_refused_at_once(device):
    grow(device, 0, "A", 50)
    grow(device, 0, "B", 50)
    report(device, 10, "A", used=10, reserve=10, cached=((0.0, 20), (8.0, 10)))
    report(device, 10, "B", used=20, cached=((2.0, 30),))
    assert grow(device, 10, "B", 4, cached=30) == ["B refused: exhausted, short 4"]
    assert grow(device, 10, "B", 40, least=1, cached=30) == ["A asked for 10 deep"], "its own are not enough"
    back(device, 10, "A", 10)
    report(device, 10, "A", answers=0, returned=10, used=10, reserve=10, cached=((0.0, 10), (8.0, 10)))
    report(device, 10, "B", used=40, cached=((6.0, 20),))
    assert grow(device, 10, "B", 4, cached=20) == ["A asked for 4 deep"], "A's are twice as old now"


def test_device_reclaim_leaves_out_what_own_prefixes_cover_for_later_claims(device):
    device.book(0, "c", Booking())
    device.open("C", "c", "c")
    grow(device, 0, "A", 40)
    grow(device, 0, "B", 60)
    report(device, 10, "A", used=5, cached=((9.0, 35),))
    report(device, 10, "B", used=20, cached=((9.0, 40),))
    assert grow(device, 10, "B", 30, least=1, cached=29) == ["A asked for 1 deep"]
    assert grow(device, 10, "C", 3) == ["A asked for 3 deep"]


def test_device_waiting_growth_is_served_by_the_latest_report_of_its_lease(device):
    grow(device, 0, "A", 70)
    grow(device, 0, "B", 30)
    report(device, 0, "A", used=20, cached=((0.0, 50),))
    report(device, 0, "B", used=10, cached=((0.0, 20),))
    device.make_room(1, "c", 20, False, 0, 5)
    assert grow(device, 1, "B", 8, cached=20) == []
    report(device, 2, "B", used=30, cached=())
    back(device, 2, "A", 20)
    assert sum(ask.asked for ask in device.reclaims.asks.values()) == 20 + 8


def test_device_reserve_of_a_running_lease_goes_after_prefixes_of_others(device):
    device.book(0, "c", Booking())
    device.open("C", "c", "c")
    grow(device, 0, "A", 60)
    grow(device, 0, "C", 40)
    report(device, 0, "A", used=40, reserve=20)
    report(device, 0, "C", reserve=10, cached=((-5.0, 10),))
    assert grow(device, 1, "B", 15) == ["C asked for 10", "C asked for 5 deep"]
    assert grow(device, 1, "B", 10) == ["C asked for 5 deep", "A asked for 5"]


def test_device_growth_that_cannot_be_met_reclaims_nothing(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=95, reserve=5)
    assert grow(device, 1, "B", 10) == ["B refused: exhausted, short 5"]


def test_device_bytes_under_reclaim_are_not_reclaimed_twice(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=60, reserve=40)
    assert grow(device, 1, "B", 10) == ["A asked for 10"]
    assert grow(device, 1, "B", 10) == ["A asked for 10"]
    assert back(device, 1, "A", 5) == ["freed 5"]
    assert back(device, 1, "A", 5) == ["freed 5", "B gets 10"]
    assert back(device, 1, "A", 10) == ["freed 10", "B gets 10"]


def test_device_bytes_behind_a_growth_are_reclaimed_with_it_once(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", cached=((-5.0, 100),))
    assert grow(device, 1, "B", 8, least=1, behind=42) == ["A asked for 50 deep"]
    assert grow(device, 1, "B", 8, least=1, behind=34) == []
    assert back(device, 1, "A", 10) == ["freed 10", "B gets 8", "B gets 2"]
    assert grow(device, 1, "B", 8, least=1, behind=32) == []
    assert back(device, 1, "A", 40) == ["freed 40", "B gets 8"]
    assert device.ledger.free == 32, "the lease did not ask for the rest: it is free"


def test_device_bytes_behind_a_growth_are_reclaimed_only_up_to_its_limit(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=20, cached=((-5.0, 80),))
    device.set_limit(0, "b", 20, 0, 0)
    assert grow(device, 1, "B", 8, least=1, behind=42) == ["A asked for 20 deep"]


def test_device_two_large_growths_each_have_their_reclaim(device):
    device.book(0, "c", Booking())
    device.open("C", "c", "c")
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=20, cached=((-5.0, 80),))
    assert grow(device, 1, "B", 8, least=1, behind=22) == ["A asked for 30 deep"]
    assert grow(device, 1, "C", 8, least=1, behind=12) == ["A asked for 20 deep"]


def test_device_bytes_behind_a_growth_beyond_the_floor_stop_no_decodes(device):
    device.book(0, "b", Booking(floor=20))
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=100)
    assert grow(device, 1, "B", 8, least=1, behind=42) == ["limit of a 80"]


def test_device_single_extent_of_a_third_lease_is_granted_between_parts_of_a_large_growth(device):
    device.book(0, "c", Booking())
    device.open("C", "c", "c")
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=20, cached=((-5.0, 80),))
    for behind in (42, 34, 26):
        grow(device, 1, "B", 8, least=1, behind=behind)
    assert grow(device, 1, "C", 1) == [], "where others run, a little more was asked for"
    assert grow(device, 1, "C", 1) == ["A asked for 1 deep"]
    assert back(device, 1, "A", 4) == ["freed 4", "B gets 4"]
    assert grow(device, 1, "B", 8, least=1, behind=22) == []
    assert back(device, 1, "A", 12) == ["freed 12", "C gets 1", "B gets 8", "C gets 1", "B gets 2"]


def test_device_reclaim_that_returned_too_little_moves_to_other_leases_or_is_refused(device):
    device.book(0, "c", Booking())
    device.open("C", "c", "c")
    grow(device, 0, "A", 50)
    grow(device, 0, "C", 50)
    report(device, 0, "A", reserve=20)
    report(device, 0, "C", reserve=10)
    assert grow(device, 1, "B", 10) == ["A asked for 10"]
    assert report(device, 1, "A", answers=0, returned=0, reserve=20) == ["C asked for 10"]
    assert report(device, 1, "C", answers=0, returned=0, reserve=10) == ["B refused: exhausted, short 10"]


def test_device_report_of_another_lease_does_not_answer_a_reclaim(device):
    assert grow(device, 0, "B", 100) == ["B gets 100"]
    report(device, 0, "B", reserve=50)
    assert grow(device, 1, "A", 10) == ["B asked for 10"]
    (ask,) = device.reclaims.asks
    assert told(device, device.report(1, "A", UsageReport(reclaim_id=ask))) == []
    assert list(device.reclaims.asks) == [ask]


@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_device_demand_that_is_negative_or_not_finite_is_refused(device, weight):
    device.set_demand({"a": 2.0})
    with pytest.raises(Invalid, match="of b makes no sense"):
        device.set_demand({"b": weight})
    assert device.reclaims.demand == {"a": 2.0}


def test_device_decodes_are_stopped_after_a_reclaim_found_no_reserve(device):
    device.book(0, "b", Booking(floor=10))
    grow(device, 0, "A", 100)
    report(device, 0, "A", reserve=20)
    assert grow(device, 1, "B", 10) == ["A asked for 10"]
    assert report(device, 1, "A", answers=0, returned=0, used=100) == ["limit of a 90"]


def test_device_growth_is_refused_when_its_reclaim_is_not_answered_in_time(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", reserve=20)
    grow(device, 1, "B", 10)
    assert device.next_deadline() == 1 + PATIENCE.reclaim_s
    assert told(device, device.tick(3)) == ["B refused: exhausted, short 10"]


def test_reserves_are_filled_from_free_memory_only(device):
    grow(device, 0, "A", 95)
    report(device, 0, "A", reserve=50)
    assert grow(device, 0, "B", 10, reserve=True) == ["B refused: exhausted, short 5"]
    assert grow(device, 0, "B", 10, least=1, reserve=True) == ["B gets 5"]


def test_device_growths_are_served_in_the_order_of_their_arrival(device):
    device.book(0, "c", Booking())
    device.open("C", "c", "c")
    grow(device, 0, "A", 90)
    report(device, 0, "A", reserve=60)
    assert grow(device, 1, "B", 40) == ["A asked for 30"]
    assert grow(device, 1, "C", 10) == ["A asked for 10"]
    assert grow(device, 1, "C", 5, reserve=True) == ["C refused: exhausted, short 5"]
    assert back(device, 1, "A", 10) == ["freed 10"]
    assert back(device, 1, "A", 30) == ["freed 30", "B gets 40", "C gets 10"]


def test_device_memory_of_an_ended_lease_serves_waiting_claims(device):
    grow(device, 0, "A", 90)
    report(device, 0, "A", reserve=50)
    assert grow(device, 1, "B", 40) == ["A asked for 30"]
    assert told(device, device.end(1, "A")) == ["freed 90", "B gets 40"]


def test_device_suspended_lease_has_no_claim_and_no_reclaim(device):
    grow(device, 0, "A", 60)
    grow(device, 0, "B", 30)
    report(device, 0, "A", reserve=50)
    assert grow(device, 1, "B", 20) == ["A asked for 10"]
    assert told(device, device.suspend(1, "A")) == ["B refused: exhausted, short 10"]
    assert told(device, device.suspend(1, "B")) == []
    assert told(device, device.resume(2, "A", [(id, 1, "kv") for id in some_kv(device, "A", 20)])) == ["freed 40"]


def test_device_growth_up_to_weights_and_floor_stops_decodes_of_others(device):
    device.book(0, "b", Booking(weights=30, floor=20))
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=100)
    assert grow(device, 1, "B", 30, kind="weights") == ["limit of a 70"]
    assert back(device, 1, "A", 30) == ["freed 30", "B gets 30", "limit of a 100"]
    assert grow(device, 1, "B", 31, kind="weights") == ["B refused: exhausted, short 31"]
    assert grow(device, 1, "B", 20) == ["limit of a 50"]
    assert back(device, 1, "A", 20) == ["freed 20", "B gets 20", "limit of a 100"]
    assert grow(device, 1, "B", 1) == ["B refused: exhausted, short 1"]


def test_a_lowered_limit_that_frees_nothing_in_time_refuses_the_growth(device):
    device.book(0, "b", Booking(floor=20))
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=100)
    grow(device, 1, "B", 20)
    assert device.next_deadline() == 1 + PATIENCE.shrink_s
    assert told(device, device.tick(6)) == ["limit of a 100", "B refused: exhausted, short 20"]


# --- limits and bookings


def test_limits_are_applied_deferred_and_refused_below_the_floor(device):
    device.book(0, "a", Booking(floor=10))
    grow(device, 0, "A", 50)
    outcome, decisions = device.set_limit(0, "a", 40, 0, 100)
    assert (outcome.state, outcome.overage) == ("deferred", 10)
    assert told(device, decisions) == ["limit of a 40"]
    with pytest.raises(Invalid, match="limit of 9 bytes is below the floor of a, 10 bytes"):
        device.set_limit(0, "a", 9, 0, 0)
    with pytest.raises(NotFound):
        device.set_limit(0, "z", 9, 0, 0)


def test_device_booking_of_an_occupied_quota_reclaims_from_others(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=80, reserve=20)
    assert told(device, device.book(1, "c", Booking(quota=30))) == ["A asked for 20", "limit of a 70"]
    assert back(device, 1, "A", 20) == ["freed 20"]
    assert back(device, 1, "A", 10) == ["freed 10", "limit of a 100"]
    assert (device.ledger.booked, device.ledger.free) == (30, 0)


def test_a_floor_that_rises_lifts_the_limit(device):
    device.set_limit(0, "a", 10, 0, 0)
    assert told(device, device.book(0, "a", Booking(floor=30))) == ["limit of a 30"]


# --- rooms


def room(device, now, model, nbytes, retract=False, hold=5.0, deadline=100.0):
    return told(device, device.make_room(now, model, nbytes, retract, hold, deadline)[1])


def test_device_room_in_free_memory_is_held_for_its_model(device):
    assert room(device, 0, "b", 60) == ["room 100, short 0"]
    assert grow(device, 0, "A", 50, least=1) == ["A gets 40"]
    assert grow(device, 0, "A", 1) == ["A refused: exhausted, short 1"]
    assert grow(device, 0, "B", 50, kind="weights") == ["B gets 50"]
    assert grow(device, 0, "B", 20, least=1) == ["B gets 10"]
    assert device.holds == {}


def test_device_hold_of_a_room_ends_when_its_model_sleeps_or_requests_no_room(device):
    room(device, 0, "b", 60)
    device.book(0, "b", Booking(0, 0, 0))
    assert device.holds == {}
    device.book(0, "b", Booking(0, 50, 10))
    room(device, 0, "b", 60)
    assert device.holds["b"].bytes == 60
    room(device, 0, "b", 0)
    assert device.holds == {}


def test_device_hold_of_a_room_ends_with_its_time(device):
    room(device, 0, "b", 60, hold=5)
    grow(device, 0, "A", 40)
    assert device.next_deadline() == 5
    device.tick(5)
    assert grow(device, 5, "A", 60) == ["A gets 60"]


def test_device_room_takes_prefixes_then_reserve_then_decodes_of_a_running_lease(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=60, reserve=20, cached=((-9.0, 20),))
    claim, decisions = device.make_room(1, "b", 70, True, 5.0, 100.0)
    assert told(device, decisions) == ["A asked for 20 deep", "A asked for 20", "limit of a 30"]
    back(device, 1, "A", 20)
    report(device, 1, "A", answers=0, returned=20, used=60, reserve=20)
    back(device, 1, "A", 20)
    report(device, 1, "A", answers=0, returned=20, used=60)
    decisions = device.give_back(2, "A", some_kv(device, "A", 30))
    assert told(device, decisions) == ["freed 30", "room 70, short 0"]
    answer = next(d for d in decisions if isinstance(d, RoomAnswer))
    assert [(t.model, t.what, t.bytes) for t in answer.taken] == [
        ("a", "decodes", 30),
        ("a", "prefixes", 20),
        ("a", "reserve", 20),
    ]
    # The victim's limit stays low until the room is used.
    assert grow(device, 2, "A", 1) == ["A refused: over_limit, short 1"]
    assert grow(device, 2, "B", 70) == ["B gets 70", "limit of a 100"]


def test_device_room_that_cannot_be_made_reports_the_missing_bytes_and_holds_nothing(device):
    device.book(0, "a", Booking(floor=50))
    grow(device, 0, "A", 100)
    report(device, 1, "A", used=100)
    assert room(device, 1, "b", 70) == ["room 0, short 70"]
    assert room(device, 1, "b", 70, retract=True) == ["limit of a 50"]
    assert back(device, 1, "A", 50) == ["freed 50", "limit of a 100", "room 50, short 20"]
    assert device.holds == {}


def test_device_room_up_to_the_floor_stops_decodes_of_others(device):
    device.book(0, "b", Booking(floor=20))
    grow(device, 0, "A", 100)
    report(device, 1, "A", used=100)
    assert room(device, 1, "b", 20) == ["limit of a 80"]
    assert back(device, 1, "A", 20) == ["freed 20", "room 20, short 0"]
    assert grow(device, 1, "B", 20) == ["B gets 20", "limit of a 100"]
    report(device, 2, "A", used=80)
    assert room(device, 2, "b", 10) == ["room 0, short 10"]


def test_device_room_reclaims_from_a_lease_without_a_later_report_before_it_is_refused(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", used=100)
    assert room(device, 1, "b", 10) == ["A asked for 10 deep"]
    assert report(device, 1, "A", answers=0, returned=0, used=100) == ["room 0, short 10"]


def test_a_room_is_answered_at_its_deadline(device):
    grow(device, 0, "A", 100)
    report(device, 0, "A", reserve=10)
    assert room(device, 1, "b", 10, deadline=1.5) == ["A asked for 10"]
    assert told(device, device.tick(1.5)) == ["room 0, short 10"]


def test_device_cancelled_room_restores_the_limit_it_lowered(device):
    device.book(0, "b", Booking(floor=10))
    grow(device, 0, "A", 100)
    report(device, 1, "A", used=100)
    claim, _ = device.make_room(1, "b", 10, True, 1.0, 100.0)
    assert device.limits.get("a").bytes == 90
    assert told(device, device.cancel(1, claim)) == ["limit of a 100"]
    assert device.claims == []


def test_device_room_requested_twice_is_held_once(device):
    room(device, 0, "b", 60)
    assert room(device, 1, "b", 60) == ["room 100, short 0"]
    assert device.holds["b"].bytes == 60


def test_device_cancelled_room_is_answered_at_once_behind_waiting_claims(device):
    grow(device, 0, "A", 30)
    room(device, 0, "b", 70)
    device.book(0, "c", Booking())
    report(device, 0, "A", reserve=30)
    assert room(device, 1, "c", 20) == ["A asked for 20"]
    assert room(device, 1, "b", 0) == ["room 70, short 0", "room 70, short 0"]
    assert device.holds.keys() == {"c"}


# --- who does not wait for a room


@pytest.fixture
def three():
    """Of 1000 bytes A holds 980 in prefixes and C, which runs, 10."""
    device = make(1000)
    for model in "abc":
        device.book(0, model, Booking())
        device.open(model.upper(), model, model)
    grow(device, 0, "A", 980)
    grow(device, 0, "C", 10)
    report(device, 0, "A", cached=((-5.0, 980),))
    report(device, 0, "C", used=10)
    return device


def test_device_growth_within_a_held_room_is_served_before_waiting_claims(three):
    assert room(three, 0, "c", 10) == ["room 10, short 0"]
    assert room(three, 1, "b", 800) == ["A asked for 825 deep"]
    assert grow(three, 1, "C", 4) == ["C gets 4"]
    assert grow(three, 1, "C", 4, reserve=True) == ["C gets 4"]
    assert grow(three, 1, "C", 3, reserve=True) == ["C refused: exhausted, short 1"]
    assert three.holds["c"].bytes == 2


def test_device_held_room_does_not_serve_bytes_that_a_booking_lacks(three):
    room(three, 0, "c", 10)
    three.book(1, "d", Booking(quota=10))
    assert three.ledger.free == 0
    assert grow(three, 1, "C", 4) == []
    assert back(three, 1, "A", 4) == ["freed 4", "C gets 4"]


def test_device_held_room_serves_the_earlier_growth_of_its_model_first(three):
    room(three, 0, "c", 10)
    assert grow(three, 1, "C", 12) == ["A asked for 2 deep"]
    assert grow(three, 1, "C", 4) == ["A asked for 4 deep"]
    assert back(three, 1, "A", 2) == ["freed 2", "C gets 12"]


def test_device_small_growth_overtakes_a_room_without_another_reclaim(three):
    assert room(three, 1, "b", 800) == ["A asked for 814 deep"]
    assert grow(three, 1, "C", 5, least=2) == ["C gets 2"]
    assert grow(three, 1, "C", 12) == []
    assert back(three, 1, "A", 100) == ["freed 100", "C gets 12"]
    assert back(three, 1, "A", 703) == ["freed 703"]
    assert back(three, 1, "A", 1) == ["freed 1", "room 800, short 0"]


def test_device_growths_overtake_a_room_up_to_a_small_share_of_it(three):
    room(three, 1, "b", 160)
    assert grow(three, 1, "C", 10) == ["A asked for 6 deep", "C gets 10"]
    assert grow(three, 1, "C", 1) == ["A asked for 1 deep"]
    assert back(three, 1, "A", 160) == ["freed 160", "room 160, short 0"]
    assert back(three, 1, "A", 1) == ["freed 1", "C gets 1"]


def test_device_part_of_a_large_growth_does_not_overtake_a_room(three):
    room(three, 1, "b", 800)
    assert grow(three, 1, "C", 4, behind=4) == []
    assert grow(three, 1, "C", 4) == []


def test_device_growth_that_would_make_a_room_short_does_not_overtake_it(three):
    report(three, 0, "A", used=180, cached=((-5.0, 800),))
    assert room(three, 1, "b", 810) == ["A asked for 800 deep"]
    assert grow(three, 1, "C", 1) == []
    assert back(three, 1, "A", 800)[:2] == ["freed 800", "room 810, short 0"]


@settings(max_examples=200)
@given(
    st.integers(16, 900),
    st.lists(
        st.one_of(
            st.tuples(st.just("grow"), st.sampled_from("CD"), st.integers(1, 8), st.integers(0, 8)),
            st.tuples(st.just("back"), st.integers(1, 200)),
        ),
        max_size=60,
    ),
)
def test_device_room_is_served_once_its_need_and_a_sixteenth_have_come(need, events):
    """Not before the need and all that passed are there, and not a byte later."""
    device = make(2000)
    for model in "abcd":
        device.book(0, model, Booking())
        device.open(model.upper(), model, model)
    grow(device, 0, "A", 1990)
    grow(device, 0, "C", 10)
    report(device, 0, "A", cached=((-5.0, 1990),))
    report(device, 0, "C", used=10)
    room(device, 0, "b", need)
    came = passed = 0
    while device.holds == {}:
        # At the end half of what is missing comes, and half of that, and the last ones one by one.
        match events.pop(0) if events else ("back", max((need + passed - came) // 2, 1)):
            case "grow", lease, count, least:
                decisions = device.grow(1, lease, 1, WantedExtents("kv", 1, count, least))
            case "back", nbytes:
                decisions = device.give_back(1, "A", some_kv(device, "A", nbytes))
                came += nbytes
        at_room = [isinstance(decision, RoomAnswer) for decision in decisions].index(True) if device.holds else None
        passed += sum(len(d.extents) for d in decisions[:at_room] if isinstance(d, Grant))
        assert passed <= need // 16
        assert (came - passed >= need) == bool(device.holds)


# --- whatever happens, the ledger adds up and nobody waits for ever


class DeviceMachine(RuleBasedStateMachine):
    """Leases that tell the truth, lie, answer, answer half and stay silent."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.device = make(60)
        self.waiting = {}
        self.rooms = set()
        self.requests = itertools.count(1)

    @initialize()
    def begin(self):
        for model in "abc":
            self.device.book(0, model, Booking())
            self.device.open(model.upper(), model, model)

    def took(self, decisions):
        for decision in decisions:
            match decision:
                case Grant(lease, request, extents):
                    assert self.waiting.pop(request) == lease
                    assert extents
                case RefuseClaim(lease, request):
                    assert self.waiting.pop(request) == lease
                case RoomAnswer(claim):
                    self.rooms.discard(claim)

    def asked(self):
        return sum(ask.asked for ask in self.device.reclaims.asks.values())

    def live(self, lease):
        return lease in self.device.ledger.leases and not self.device.ledger.leases[lease].suspended

    LEASES = st.sampled_from("ABC")

    @rule(
        lease=LEASES,
        count=st.integers(1, 30),
        size=st.sampled_from((1, 1, 4)),
        least=st.integers(0, 30),
        reserve=st.booleans(),
        kv=st.booleans(),
        behind=st.integers(0, 40),
        cached=st.integers(0, 40),
    )
    def grow(self, lease, count, size, least, reserve, kv, behind, cached):
        if self.live(lease):
            request = next(self.requests)
            self.waiting[request] = lease
            kind = "kv" if kv else "weights"
            device, asked = self.device, self.asked()
            asks = WantedExtents(kind, size, count, least, reserve, behind, cached)
            wanted = sum(claim.want + claim.behind for claim in device.claims) + count * size + behind
            wanted += sum(hold.bytes for hold in device.holds.values()) + max(0, -device.ledger.free)
            self.took(self.device.grow(self.now, lease, request, asks))
            # A lease gives back whole extents, of four bytes at most; and a 32nd is for those who come in between.
            assert self.asked() - asked < wanted + wanted // 32 + 3 * 4, "no more is asked for than is wanted"

    @rule(lease=LEASES, count=st.integers(1, 30))
    def give_back(self, lease, count):
        if self.live(lease):
            ids = list(self.device.ledger.leases[lease].extents)[:count]
            self.took(self.device.give_back(self.now, lease, ids))

    @rule(
        lease=LEASES, honest=st.booleans(), reserve=st.integers(0, 60), cached=st.integers(0, 60), part=st.floats(0, 1)
    )
    def report_or_answer(self, lease, honest, reserve, cached, part):
        if not self.live(lease):
            return
        held = self.device.ledger.leases[lease].kv_bytes
        if honest:
            reserve, cached = min(reserve, held), min(cached, max(0, held - reserve))
        told = dict(at=self.now, held=held, reserve=reserve, cached=((self.now - 1, cached),))
        asks = [ask for ask in self.device.reclaims.asks.values() if ask.lease_id == lease]
        if asks:
            returned = min(int(asks[0].asked * part), held)
            ids = some_kv(self.device, lease, returned)
            self.took(self.device.give_back(self.now, lease, ids))
            told |= dict(reclaim_id=asks[0].id, returned=len(ids))
        self.took(self.device.report(self.now, lease, UsageReport(**told)))

    @rule(model=st.sampled_from("abc"))
    def obey_the_limit(self, model):
        lease = model.upper()
        if self.live(lease):
            over = self.device.ledger.kv_of(model) - self.device.limits.get(model).bytes
            if over > 0:
                self.took(self.device.give_back(self.now, lease, some_kv(self.device, lease, over)))

    @rule(model=st.sampled_from("abc"), nbytes=st.integers(-1, 60))
    def set_limit(self, model, nbytes):
        try:
            self.took(self.device.set_limit(self.now, model, nbytes, 0, 0)[1])
        except PrismError:
            pass

    @rule(model=st.sampled_from("abc"), quota=st.integers(0, 20), weights=st.integers(0, 20), floor=st.integers(0, 20))
    def book(self, model, quota, weights, floor):
        try:
            self.took(self.device.book(self.now, model, Booking(quota, weights, floor)))
        except PrismError:
            pass

    @rule(model=st.sampled_from("abc"), nbytes=st.integers(1, 60), retract=st.booleans(), hold=st.floats(0, 3))
    def make_room(self, model, nbytes, retract, hold):
        claim, decisions = self.device.make_room(self.now, model, nbytes, retract, hold, self.now + 8)
        self.rooms.add(claim)
        self.took(decisions)

    @rule(lease=LEASES)
    def suspend_or_resume(self, lease):
        ledger = self.device.ledger
        if ledger.leases[lease].suspended:
            held = [(e.id, e.bytes, e.kind) for e in list(ledger.leases[lease].extents.values())[1:]]
            self.took(self.device.resume(self.now, lease, held))
        else:
            self.took(self.device.suspend(self.now, lease))
            self.waiting = {request: other for request, other in self.waiting.items() if other != lease}

    @rule(lease=LEASES)
    def die_and_be_replaced(self, lease):
        self.took(self.device.end(self.now, lease))
        self.waiting = {request: other for request, other in self.waiting.items() if other != lease}
        self.device.open(lease, lease.lower(), lease)

    @rule(seconds=st.floats(0.1, 4))
    def time_passes(self, seconds):
        self.now += seconds
        self.took(self.device.tick(self.now))

    @invariant()
    def the_ledger_adds_up(self):
        self.device.ledger.check()

    @invariant()
    def no_limit_is_below_a_floor(self):
        for model, booking in self.device.ledger.bookings.items():
            assert self.device.limits.get(model).bytes >= booking.floor

    @invariant()
    def what_is_held_for_somebody_is_not_granted_to_others(self):
        held = sum(hold.bytes for hold in self.device.holds.values())
        assert self.device.ledger.free >= held or self.device.ledger.booked or not held

    def teardown(self):
        """However it stands, it ends: nobody answers any more, and every claim is over after the longest patience."""
        for _ in range(200):
            due = self.device.next_deadline()
            if due is None:
                break
            self.now = max(self.now, due)
            self.took(self.device.tick(self.now))
        assert self.waiting == {} and self.rooms == set() and self.device.claims == []
        assert self.device.holds == {}


DeviceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestDeviceUnderEverything = DeviceMachine.TestCase
