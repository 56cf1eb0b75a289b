"""A lease against a real balloond."""

import asyncio
import os
import queue
import signal
import threading

import pytest

from balloond.driver.connection import alive
from balloond.driver.connection.lease import KV, WEIGHTS, GrowRefused, Lease, LeaseRefused, Usage
from tests.balloond.conftest import MIB, TIMEOUT_S

EXTENT = 64 << 10


@pytest.fixture
def attach(shared):
    leases = []

    def new(model="a"):
        leases.append(Lease.attach(shared.handoff, shared.name, model, timeout_s=TIMEOUT_S))
        return leases[-1]

    yield new
    for lease in leases:
        lease.detach()


def run(work):
    return asyncio.run(work)


def close(granted):
    for extent in granted:
        os.close(extent.fd)
    return [extent.id for extent in granted]


def test_an_attached_lease_knows_its_limit_and_page(shared, attach):
    run(shared.book("a", floor=MIB))
    lease = attach()
    assert (lease.page_bytes, lease.limit.bytes, lease.limit.floor_bytes) == (EXTENT, 16 * MIB, MIB)
    assert [x.pid for x in run(shared.device()).leases] == [os.getpid()]


def test_lease_without_a_booking_a_device_or_a_balloond_is_refused(shared, tmp_path):
    with pytest.raises(LeaseRefused) as refusal:
        Lease.attach(shared.handoff, shared.name, "nobody", timeout_s=TIMEOUT_S)
    assert (refusal.value.why, refusal.value.detail) == ("not_booked", "nobody has no booking")
    with pytest.raises(LeaseRefused, match="no device 'tpu:0'"):
        Lease.attach(shared.handoff, "tpu:0", "a", timeout_s=TIMEOUT_S)
    with pytest.raises(LeaseRefused, match="timeout: balloond at .*nobody.sock gave no answer within 0.05 s"):
        Lease.attach(str(tmp_path / "nobody.sock"), "cpu:0", "a", timeout_s=0.05)


def test_handoff_lock_is_held_while_a_process_has_a_lease(node):
    run(node.book("a"))
    assert not alive.anybody(node.handoff)
    lease = Lease.attach(node.handoff, node.name, "a", timeout_s=TIMEOUT_S)
    assert alive.anybody(node.handoff)
    lease.detach()
    assert not alive.anybody(node.handoff)


def test_ledger_counts_extents_of_a_lease_until_they_are_returned(shared, attach):
    run(shared.book("a", weights=MIB))
    lease = attach()
    kv, weights = lease.grow(KV, EXTENT, 3, timeout_s=TIMEOUT_S), lease.grow(WEIGHTS, MIB, 1, timeout_s=TIMEOUT_S)
    (state,) = run(shared.device()).leases
    assert (state.kv_bytes, state.weights_bytes) == (3 * EXTENT, MIB)
    assert lease.held_ids == {extent.id for extent in kv + weights}
    lease.give_back(close(kv + weights))
    run(shared.until(lambda device: device.free_bytes == 16 * MIB))
    assert lease.held_ids == set()


def test_lease_growth_refusal_carries_its_reason_and_the_missing_bytes(shared, attach):
    run(shared.book("a"))
    lease = attach()
    with pytest.raises(GrowRefused) as refusal:
        lease.grow(KV, MIB, 17, timeout_s=TIMEOUT_S)
    assert (refusal.value.why, refusal.value.short_bytes) == ("over_limit", MIB)
    with pytest.raises(GrowRefused) as refusal:
        lease.grow(WEIGHTS, MIB, 17, timeout_s=TIMEOUT_S)
    assert (refusal.value.why, refusal.value.short_bytes) == ("exhausted", MIB)
    assert "capacity 16777216, leased 0, booked 0, stranded 0" in refusal.value.detail
    fewer = lease.grow(KV, MIB, 17, min_count=1, timeout_s=TIMEOUT_S)
    assert len(fewer) == 16
    close(fewer)


def test_lease_grant_after_the_timeout_of_its_growth_is_returned_at_once(shared, attach):
    run(shared.book("a"))
    run(shared.book("b", floor=8 * MIB))
    one, other = attach("a"), attach("b")
    mine = one.grow(KV, MIB, 16, timeout_s=TIMEOUT_S)
    with pytest.raises(GrowRefused, match="timeout"):
        other.grow(KV, MIB, 8, timeout_s=0.05)
    one.give_back(close(mine))
    run(shared.until(lambda device: device.free_bytes == 16 * MIB))
    assert other.held_ids == set()


def test_lease_receives_a_new_limit_without_a_request(shared, attach):
    run(shared.book("a"))
    lease = attach()
    arrived = threading.Event()
    lease.on_limit = arrived.set

    async def lower():
        async with shared.client() as client:
            await client.set_limit(shared.name, "a", MIB, deadline_ms=250)

    run(lower())
    assert arrived.wait(TIMEOUT_S)
    assert (lease.limit.bytes, lease.limit.deadline_ms) == (MIB, 250)


def test_a_lease_without_a_range_answers_reclaims_with_nothing(shared, attach):
    run(shared.book("a", "b"))
    one, other = attach("a"), attach("b")
    one.grow(KV, MIB, 16, timeout_s=TIMEOUT_S)
    one.report(Usage(held=16 * MIB, reserve=16 * MIB))
    run(shared.until(lambda device: any(lease.kv_reserve_bytes for lease in device.leases)))
    with pytest.raises(GrowRefused, match="exhausted"):
        other.grow(KV, MIB, 1, timeout_s=TIMEOUT_S)


def test_lease_growths_from_four_threads_are_each_answered(shared, attach):
    run(shared.book("a"))
    lease, got = attach(), []

    def work():
        for _ in range(5):
            got.append(close(lease.grow(KV, EXTENT, 2, timeout_s=TIMEOUT_S)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len({id for ids in got for id in ids}) == 40


def test_lease_after_detach_holds_nothing_and_ends_its_thread(shared):
    run(shared.book("a"))
    lease = Lease.attach(shared.handoff, shared.name, "a", timeout_s=TIMEOUT_S)
    close(lease.grow(KV, EXTENT, 3, timeout_s=TIMEOUT_S))
    lease.detach()
    assert run(shared.device()).leases == []
    lease.loop.join(TIMEOUT_S)
    assert not lease.loop.alive


async def test_lease_detached_while_balloond_is_away_ends_at_the_next_balloond(node):
    await node.book("a")
    lease = await asyncio.to_thread(Lease.attach, node.handoff, node.name, "a", timeout_s=TIMEOUT_S)
    close(await asyncio.to_thread(lease.grow, KV, EXTENT, 3, timeout_s=TIMEOUT_S))
    node.kill(node.balloond)
    lease.detach(timeout_s=0.0)
    await node.start_balloond()
    await node.until(lambda device: not device.leases and device.free_bytes == 16 * MIB)
    await asyncio.to_thread(lease.loop.join, TIMEOUT_S)
    assert not lease.loop.alive


async def test_lease_calls_return_while_balloond_is_stopped(node):
    await node.book("a")
    lease = await asyncio.to_thread(Lease.attach, node.handoff, node.name, "a", timeout_s=TIMEOUT_S)
    extents = await asyncio.to_thread(lease.grow, KV, EXTENT, 4, timeout_s=TIMEOUT_S)
    node.balloond.send_signal(signal.SIGSTOP)
    answers = queue.SimpleQueue()

    def go_on():
        for number in range(3000):
            lease.report(Usage(held=4 * EXTENT, used=number))
        lease.request(KV, EXTENT, 2, lambda *answer: answers.put(answer))
        lease.give_back(close(extents))

    try:
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.to_thread(go_on)
        assert answers.empty()
    finally:
        node.balloond.send_signal(signal.SIGCONT)
    granted, refused = await asyncio.to_thread(answers.get, timeout=TIMEOUT_S)
    assert (len(granted), refused) == (2, None)
    await node.until(lambda device: device.leased_bytes == 2 * EXTENT)
    assert lease.held_ids == set(close(granted))
    lease.detach()


async def test_lease_messages_waiting_for_a_killed_balloond_reach_the_next_one(node):
    await node.book("a")
    lease = await asyncio.to_thread(Lease.attach, node.handoff, node.name, "a", timeout_s=TIMEOUT_S)
    extents = await asyncio.to_thread(lease.grow, KV, EXTENT, 4, timeout_s=TIMEOUT_S)
    node.balloond.send_signal(signal.SIGSTOP)
    for number in range(3000):
        lease.report(Usage(held=4 * EXTENT, used=number))
    lease.give_back(close(extents[:3]))
    node.kill(node.balloond)
    await node.start_balloond()
    await node.until(lambda device: device.leased_bytes == EXTENT)
    more = await asyncio.to_thread(lease.grow, KV, EXTENT, 2, timeout_s=TIMEOUT_S)
    assert lease.held_ids == {*close(more), *close(extents[3:])}
    lease.detach()


async def test_lease_names_more_extents_than_one_message_holds_after_a_restart_of_balloond(node):
    node.kill(node.balloond)
    node.write_config(devices=(("cpu:0", 600 * MIB),))
    await node.start_balloond()
    await node.book("a")
    lease = await asyncio.to_thread(Lease.attach, node.handoff, node.name, "a", timeout_s=TIMEOUT_S)
    count = 5000
    held = []
    while len(held) < count:
        held += close(await asyncio.to_thread(lease.grow, KV, EXTENT, 1000, timeout_s=TIMEOUT_S))
    node.kill(node.balloond)
    await node.start_balloond()
    device = await node.until(lambda device: not any(lease.suspended for lease in device.leases))
    assert (device.leased_bytes, device.stranded_bytes) == (count * EXTENT, 0)
    await asyncio.to_thread(lease.give_back, held)
    await node.until(lambda device: device.free_bytes == 600 * MIB)
    await asyncio.to_thread(lease.detach)
