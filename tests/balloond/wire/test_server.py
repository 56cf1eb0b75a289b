"""The gRPC service, through its client."""

import asyncio
import signal
from types import SimpleNamespace

import pytest

from balloond.wire.server import BalloondServicer
from protos import balloond_pb2
from services.errors import Invalid, NotFound, Refused, TimedOut, Unmet
from services.rpc.watch import Watched
from testing.patience import PATIENCE_S
from tests.balloond.child import EXTENT
from tests.balloond.conftest import MIB


@pytest.fixture
async def client(shared):
    async with shared.client() as client:
        yield client


async def test_a_booking_that_does_not_fit_is_refused_with_the_arithmetic(shared, client):
    await shared.book("a", quota=6 * MIB, weights=2 * MIB)
    with pytest.raises(Refused) as refusal:
        await client.set_booking(shared.name, "b", quota_bytes=5 * MIB, weights_bytes=3 * MIB, floor_bytes=MIB)
    assert str(refusal.value) == (
        "b needs 9,437,184 bytes (quota 5,242,880 + weights 3,145,728 + floor 1,048,576); other models have booked "
        "8,388,608 of 16,777,216, which leaves 8,388,608"
    )
    assert [booking.model for booking in (await shared.device()).bookings] == ["a"]


async def test_an_unknown_device_or_booking_is_not_found(shared, client):
    with pytest.raises(NotFound, match="no device 'gpu:9' on this node"):
        await client.set_booking("gpu:9", "b", quota_bytes=0, weights_bytes=0, floor_bytes=0)
    with pytest.raises(NotFound, match="z has no booking"):
        await client.drop_booking(shared.name, "z")
    with pytest.raises(NotFound, match="z has no booking"):
        await client.set_limit(shared.name, "z", 5)


async def test_a_booking_is_kept_while_a_lease_lives(shared, client, child):
    await shared.book("a")
    child("a")
    with pytest.raises(Unmet, match="a has lease"):
        await client.drop_booking(shared.name, "a")


async def test_limit_is_applied_deferred_stale_conflicting_or_refused_below_the_floor(shared, client, child):
    await shared.book("a", floor=2 * EXTENT)
    one = child("a")
    one.ask("acquire", 8)
    applied = await client.set_limit(shared.name, "a", 10 * EXTENT, revision=5)
    assert (applied.state, applied.revision, applied.held_bytes) == (balloond_pb2.APPLIED, 5, 8 * EXTENT)
    assert await client.set_limit(shared.name, "a", 10 * EXTENT, revision=5) == applied
    assert (await client.set_limit(shared.name, "a", 9 * EXTENT, revision=5)).state == balloond_pb2.CONFLICT
    assert (await client.set_limit(shared.name, "a", 9 * EXTENT, revision=4)).state == balloond_pb2.STALE
    deferred = await client.set_limit(shared.name, "a", 5 * EXTENT)
    assert (deferred.state, deferred.overage_bytes) == (balloond_pb2.DEFERRED, 3 * EXTENT)
    with pytest.raises(Invalid, match=f"limit of {EXTENT:,} bytes is below the floor of a, {2 * EXTENT:,} bytes"):
        await client.set_limit(shared.name, "a", EXTENT)
    whole = await client.set_limit(shared.name, "a", -1)
    assert whole.state == balloond_pb2.APPLIED
    assert (await shared.device()).bookings[0].limit_bytes == 16 * MIB


async def test_watch_sends_the_state_at_once_and_after_a_change(shared, client):
    states = client.watch()
    first = await anext(states)
    await client.set_demand(shared.name, {"a": 3.0})
    await shared.book("a")
    async with asyncio.timeout(PATIENCE_S):
        async for state in states:
            bookings = {b.model: b.demand_weight for d in state.devices if d.device == shared.name for b in d.bookings}
            if bookings:
                break
    assert bookings == {"a": 3.0}
    assert state.revision > first.revision
    await states.aclose()


async def test_watch_sends_bookings_at_once_and_page_counts_at_the_requested_interval():
    changed, states = Watched(None), [balloond_pb2.NodeState(devices=[balloond_pb2.DeviceState(device="d")])]
    servicer = BalloondServicer("node", SimpleNamespace(changed=changed), None)
    servicer._state = lambda: states[-1]
    told = servicer.Watch(balloond_pb2.WatchRequest(pages_ms=60_000), None)
    assert await anext(told) == states[0]
    for free_bytes, models in ((5, []), (4, []), (3, ["m"])):
        device = balloond_pb2.DeviceState(device="d", free_bytes=free_bytes)
        for model in models:
            device.bookings.add(model=model)
        states.append(balloond_pb2.NodeState(devices=[device]))
        changed.set(None)
    async with asyncio.timeout(PATIENCE_S):
        assert await anext(told) == states[-1]
    await told.aclose()


async def test_room_that_cannot_be_made_is_short_within_the_time_of_its_caller(shared, client, child):
    await shared.book("a", "b")
    one = child("a")
    one.ask("acquire", 60)
    one.ask("usage", 60 * EXTENT)
    await shared.until(lambda device: any(lease.kv_used_bytes for lease in device.leases))
    room = await client.make_room(
        shared.name, "b", bytes=8 * EXTENT, may_retract=False, hold_ms=1000, timeout_s=PATIENCE_S
    )
    assert (room.short_bytes, room.free_bytes) == (4 * EXTENT, 4 * EXTENT)
    # It does not obey its limit: the call ends with its time, one way or the other.
    try:
        room = await client.make_room(shared.name, "b", bytes=8 * EXTENT, may_retract=True, hold_ms=1000, timeout_s=0.3)
        assert room.short_bytes == 4 * EXTENT
    except TimedOut:
        pass
    device = await shared.until(lambda device: all(b.limit_bytes == 16 * MIB for b in device.bookings))
    assert device.free_bytes == 4 * EXTENT


async def test_events_of_balloond_are_listed_in_order(shared, client):
    await shared.book("a", quota=1)
    await client.drop_booking(shared.name, "a")
    mine = [event for event in await client.events() if event.device == shared.name]
    assert [event.what for event in mine[-2:]] == ["booked", "booking dropped"]
    assert mine[-1].sequence > mine[-2].sequence
    assert len(await client.events(limit=1)) == 1


async def test_inspect_with_keeper_reports_whether_the_keeper_answers(node):
    async with node.client() as client, asyncio.timeout(PATIENCE_S):

        async def until(answers):
            """It may be late on a busy machine."""
            while (await client.inspect(with_keeper=True)).keeper.answers != answers:
                pass

        assert not (await client.inspect()).HasField("keeper")
        assert (await client.inspect(with_keeper=True)).keeper.socket == node.keeper_path
        await until(True)
        node.keeper.send_signal(signal.SIGSTOP)
        await until(False)
        node.keeper.send_signal(signal.SIGCONT)
        await until(True)
