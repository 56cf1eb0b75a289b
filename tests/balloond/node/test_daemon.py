"""Real processes: a keeper, a balloond, and children that hold memory."""

import asyncio
import re
import resource
import signal
from pathlib import Path

from balloond.policy import capacity
from services.runtime import tasks
from testing import descriptors
from testing.patience import PATIENCE_S
from tests.balloond.child import EXTENT
from tests.balloond.conftest import MIB

CONFIG = {"reclaim_timeout_s": 60.0}
"""Children answer as soon as these tests tell them to, which may be late."""


def kv(count):
    return lambda device: sum(lease.kv_bytes for lease in device.leases) == count * EXTENT


async def test_memory_of_a_killed_process_goes_to_a_waiting_neighbour(shared, child):
    await shared.book("a", "b", floor=8 * MIB)
    one, other = child("a"), child("b")
    assert one.ask("acquire", 64) == "64"
    other.tell("acquire", 4)  # within its floor: it waits for `a`, whose limit is lowered
    await shared.until(lambda device: any(b.model == "a" and b.limit_bytes == 15 * MIB for b in device.bookings))
    one.kill()
    assert await asyncio.to_thread(other.answer) == "4"
    device = await shared.until(kv(4))
    assert device.free_bytes == 15 * MIB
    assert [lease.model for lease in device.leases] == ["b"]


async def test_memory_of_a_process_killed_while_suspended_is_freed(node, child):
    await node.book("a")
    one = child("a")
    one.ask("acquire", 10)
    # It is stopped before balloond goes away, so it cannot attach again.
    one.process.send_signal(signal.SIGSTOP)
    node.kill(node.balloond)
    await node.start_balloond()
    device = await node.device()
    assert [(lease.suspended, lease.kv_bytes) for lease in device.leases] == [(True, 10 * EXTENT)]
    one.kill()
    device = await node.until(kv(0))
    assert device.leases == []
    assert device.free_bytes == 16 * MIB


async def test_balloond_killed_under_two_processes_keeps_the_ledger_and_content(node, child):
    await node.book("a", "b", quota=MIB, weights=2 * MIB)
    one, other = child("a"), child("b")
    one.ask("acquire", 5)
    other.ask("acquire", 7)
    one.ask("grow_weights", 2 * MIB)
    one.ask("fill_weights", 77)
    one.ask("write", "one")
    other.ask("write", "other")
    async with node.client() as client:
        await client.set_limit(node.name, "a", 8 * MIB)
    before = await node.device()
    node.kill(node.balloond)
    assert one.ask("read", "one") == "same"
    await node.start_balloond()
    after = await node.until(lambda device: not any(lease.suspended for lease in device.leases))

    def facts(device):
        leases = sorted((x.lease_id, x.pid, x.kv_bytes, x.weights_bytes, x.extents) for x in device.leases)
        bookings = sorted((b.model, b.quota_bytes, b.weights_bytes, b.limit_bytes) for b in device.bookings)
        return leases, bookings, device.leased_bytes, device.free_bytes, device.booked_bytes, device.stranded_bytes

    assert facts(after) == facts(before)
    assert (one.ask("read", "one"), other.ask("read", "other"), one.ask("weights_byte")) == ("same", "same", "77")
    assert other.ask("acquire", 2) == "2"
    assert one.ask("release", 5) == "ok"
    assert one.ask("empty") == "ok"
    await node.until(kv(9))


async def test_balloond_killed_under_large_and_small_extents_keeps_the_ledger_and_content(node, child):
    await node.book("a")
    one = child("a", 0, 0, 4)
    assert one.ask("acquire", 19) == "19"
    one.ask("write", "one")
    assert [lease.extents for lease in (await node.device()).leases] == [4 + 3]
    node.kill(node.balloond)
    await node.start_balloond()
    device = await node.until(lambda device: device.leases and not any(lease.suspended for lease in device.leases))
    assert [(lease.extents, lease.kv_bytes) for lease in device.leases] == [(7, 19 * EXTENT)]
    assert one.ask("read", "one") == "same"
    one.ask("release", 5)
    await node.until(kv(16))  # what is left of a large one stays
    assert one.ask("read", "one") == "same"
    one.kill()
    await node.until(kv(0))


async def test_growth_waiting_while_balloond_is_away_is_served_by_the_next_balloond(node, child):
    await node.book("a")
    one = child("a")
    node.kill(node.balloond)
    one.tell("acquire", 3)
    await node.start_balloond()
    assert await asyncio.to_thread(one.answer) == "3"
    await node.until(kv(3))


async def test_daemon_extents_returned_while_it_was_away_are_free_afterwards(node, child):
    await node.book("a")
    one = child("a")
    one.ask("acquire", 6)
    node.kill(node.balloond)
    one.ask("release", 6)
    one.ask("empty")
    await node.start_balloond()
    device = await node.until(lambda device: device.free_bytes == 16 * MIB)
    assert len(device.leases) == 1


async def test_lease_of_a_process_that_died_while_balloond_was_away_is_ended(node, child):
    await node.book("a", "b")
    one, other = child("a"), child("b")
    one.ask("acquire", 6)
    other.ask("acquire", 2)
    node.kill(node.balloond)
    one.kill()
    await node.start_balloond()
    device = await node.until(kv(2))
    assert [lease.model for lease in device.leases] == ["b"]


async def test_keeper_that_restarted_empty_receives_every_record_again(node, child):
    await node.book("a")
    one = child("a")
    one.ask("acquire", 5)
    one.ask("write", "x")
    before = await node.device()
    node.kill(node.keeper)
    await node.start_keeper()
    assert await one.asked("acquire", 1) == "1"  # granted only when the new keeper has it, and so everything before
    node.kill(node.balloond)
    await node.start_balloond()
    device = await node.until(lambda device: any(not lease.suspended for lease in device.leases))
    assert device.leased_bytes == before.leased_bytes + EXTENT
    assert device.stranded_bytes == 0
    assert one.ask("release", 1) == "ok"
    assert one.ask("read", "x") == "same"


async def test_growth_while_the_keeper_is_away_is_granted_after_its_return(node, child):
    await node.book("a")
    one = child("a")
    node.kill(node.keeper)
    one.tell("acquire", 2)
    # Booked before anything is created, and the grant waits for its record.
    await node.until(lambda device: device.leased_bytes == 2 * EXTENT)
    await node.start_keeper()
    assert await asyncio.to_thread(one.answer) == "2"


def extents_open(process):
    """How many extents the process has a descriptor of."""
    return sum("prism-extent" in link for link in descriptors.links(process.pid).values())


async def test_extents_are_created_only_when_the_keeper_no_longer_holds_the_memory_for_them(node, child):
    await node.book("a", "b")
    one, other = child("a"), child("b")
    assert one.ask("acquire", 40) == "40"
    node.keeper.send_signal(signal.SIGSTOP)
    one.ask("release", 40)
    one.ask("empty")
    await node.until(kv(0))
    other.tell("acquire", 60)
    await node.until(kv(60))
    assert (extents_open(node.keeper), extents_open(node.balloond)) == (40, 0)
    node.keeper.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(other.answer) == "60"


async def test_extents_are_stranded_until_returned_when_keeper_and_balloond_both_died(node, child):
    await node.book("a")
    one = child("a")
    one.ask("acquire", 5)
    one.ask("grow_weights", MIB)
    one.ask("write", "x")
    node.kill(node.balloond)
    node.kill(node.keeper)
    await node.start()
    device = await node.until(lambda device: device.stranded_bytes > 0)
    assert (device.stranded_bytes, device.leased_bytes) == (5 * EXTENT + MIB, 0)
    assert one.ask("read", "x") == "same"
    # It is entitled to what it has, and grows on.
    assert one.ask("acquire", 2) == "2"
    device = await node.until(lambda device: device.leased_bytes == 2 * EXTENT)
    assert one.ask("release", 7) == "ok"
    assert one.ask("empty") == "ok"
    assert one.ask("leave_weights") == "ok"
    device = await node.until(lambda device: device.stranded_bytes == 0)
    assert device.free_bytes == 16 * MIB


async def test_stranded_memory_that_others_booked_meanwhile_is_still_counted(node, child):
    await node.book("a", weights=8 * MIB)
    one = child("a")
    one.ask("grow_weights", 8 * MIB)
    one.process.send_signal(signal.SIGSTOP)  # it does not attach before the other booking is made
    node.kill(node.balloond)
    node.kill(node.keeper)
    await node.start()
    await node.book("b", quota=2 * MIB, weights=14 * MIB)
    one.process.send_signal(signal.SIGCONT)
    device = await node.until(lambda device: device.stranded_bytes == 8 * MIB)
    assert (device.booked_bytes, device.free_bytes) == (2 * MIB, 6 * MIB)
    one.ask("leave_weights")
    await node.until(lambda device: device.free_bytes == 14 * MIB)


async def test_booking_of_a_detached_lease_can_be_dropped(shared, child):
    await shared.book("a")
    one = child("a")
    one.ask("acquire", 5)
    assert await one.asked("detach") == "ok"
    assert (await shared.device()).leases == []
    async with shared.client() as client:
        await client.drop_booking(shared.name, "a")
    assert (await shared.device()).bookings == []


async def test_reserve_of_a_neighbour_whose_main_thread_is_busy_is_reclaimed(shared, child):
    await shared.book("a", "b")
    one, other = child("a", 40, 40), child("b")
    one.ask("acquire", 4)
    await shared.until(lambda device: any(lease.kv_reserve_bytes == 40 * EXTENT for lease in device.leases))
    one.tell("block")
    assert one.answer() == "blocked"
    assert await other.asked("acquire", 40) == "40"
    assert one.ask("go") == "unblocked go"
    assert one.ask("mapped") == str(24 * EXTENT)


async def test_lowered_limit_takes_the_reserve_at_once_and_wakes_the_engine_for_the_rest(shared, child):
    await shared.book("a")
    one = child("a", 10, 10)
    one.ask("acquire", 10)
    await shared.until(kv(20))
    one.tell("block")
    one.answer()
    async with shared.client() as client:
        answer = await client.set_limit(shared.name, "a", 6 * EXTENT, deadline_ms=100)
        assert (answer.state, answer.overage_bytes) == (2, 14 * EXTENT)
    device = await shared.until(kv(10))
    assert device.leases[0].overage_bytes == 4 * EXTENT
    assert one.ask("go") == "unblocked go"
    assert one.ask("wait_wake") == f"reclaim 0 overage {4 * EXTENT}"
    one.ask("release", 4)
    device = await shared.until(kv(6))
    assert device.leases[0].overage_bytes == 0
    assert one.ask("acquire", 1) == "0"


async def test_daemon_growth_reclaims_cached_prefixes_of_an_idle_neighbour(shared, child):
    await shared.book("a", "b")
    one, other = child("a", 0, 0), child("b", 0, 0)
    one.ask("acquire", 64)
    one.ask("usage", 10 * EXTENT, f"5:{30 * EXTENT}", f"1:{24 * EXTENT}")
    await shared.until(lambda device: any(lease.kv_cached_bytes for lease in device.leases))
    other.tell("acquire", 12)
    assert await one.asked("wait_wake") == f"reclaim {12 * EXTENT} overage 0"
    one.ask("release", 12)
    one.ask("reclaimed")
    assert await asyncio.to_thread(other.answer) == "12"


async def test_growth_of_many_extents_reclaims_once_from_a_neighbour_and_gets_large_extents(shared, child):
    await shared.book("a", "b")
    one, other = child("a"), child("b", 0, 0, 4)
    one.ask("acquire", 64)
    one.ask("usage", 0, f"5:{64 * EXTENT}")
    await shared.until(lambda device: any(lease.kv_cached_bytes for lease in device.leases))
    other.tell("acquire", 50)
    assert await one.asked("wait_wake") == f"reclaim {50 * EXTENT} overage 0"
    one.ask("release", 30)
    await shared.until(lambda device: any(lease.model == "b" and lease.kv_bytes for lease in device.leases))
    one.ask("release", 20)
    one.ask("reclaimed")
    assert await asyncio.to_thread(other.answer) == "50"
    device = await shared.device()
    assert {lease.model: lease.kv_bytes // EXTENT for lease in device.leases} == {"a": 14, "b": 50}
    assert next(lease.extents for lease in device.leases if lease.model == "b") == 48 // 4 + 2
    async with shared.client() as client:
        events = await client.events()
    mine = events[max(number for number, event in enumerate(events) if event.what == "lease") :]
    assert [event.model for event in mine if event.what == "reclaim"] == ["a"]


async def test_room_is_made_and_held_for_a_model_that_wakes(shared, child):
    await shared.book("a", floor=2 * MIB)
    await shared.book("b", weights=8 * MIB, floor=MIB)
    one = child("a", 20, 20)
    one.ask("acquire", 40)
    one.ask("usage", 40 * EXTENT)
    await shared.until(lambda device: any(lease.kv_reserve_bytes == 20 * EXTENT for lease in device.leases))
    async with shared.client() as client:

        async def obey():
            assert await one.asked("wait_wake") == f"reclaim 0 overage {12 * EXTENT}"
            one.ask("release", 12)

        room, _ = await asyncio.gather(
            client.make_room(shared.name, "b", bytes=9 * MIB, may_retract=True, hold_ms=60_000, timeout_s=PATIENCE_S),
            obey(),
        )
        assert room.short_bytes == 0
        assert {(t.model, t.what) for t in room.taken} == {("a", "reserve"), ("a", "decodes")}
        assert one.ask("acquire", 8, 0) == "0"
        other = child("b")
        assert other.ask("grow_weights", 8 * MIB) == str(8 * MIB)
        assert other.ask("acquire", 4) == "4"
        # The room is used up: the limit that was lowered for it is lifted.
        device = await shared.until(lambda d: all(b.limit_bytes == 16 * MIB for b in d.bookings))
        assert device.leased_bytes == 16 * MIB
        events = await client.events()
    assert {"booked", "lease", "granted", "freed", "reclaim", "limit", "room"} <= {event.what for event in events}


async def test_daemon_decoding_engine_grows_while_a_large_room_waits_for_its_neighbour(shared, child):
    await shared.book("a", "b", "c")
    one, third = child("a"), child("c")
    assert (one.ask("acquire", 58), third.ask("acquire", 2)) == ("58", "2")
    one.ask("usage", 0, f"5:{58 * EXTENT}")
    third.ask("usage", 2 * EXTENT)
    await shared.until(
        lambda d: sum(x.kv_cached_bytes for x in d.leases) == 58 * EXTENT and any(x.kv_used_bytes for x in d.leases)
    )
    async with shared.client() as client:
        room = tasks.spawn(
            client.make_room(
                shared.name, "b", bytes=48 * EXTENT, may_retract=False, hold_ms=60_000, timeout_s=PATIENCE_S
            ),
            "room",
        )
        # The neighbour knows, and does nothing yet.
        assert await one.asked("wait_wake") == f"reclaim {45 * EXTENT} overage 0"
        assert await third.asked("acquire", 1) == "1"
        assert not room.done()
        one.ask("release", 45)
        one.ask("reclaimed")
        assert (await room).short_bytes == 0
        events = await client.events()
    mine = [event for event in events if event.device == shared.name]
    assert [event.model for event in mine if event.what == "reclaim"] == ["a"]


async def test_growth_for_which_the_backend_cannot_create_extents_is_refused(tmp_path, node, child):
    """Descriptors run out long before the memory does."""
    await node.book("a")
    one = child("a")
    resource.prlimit(node.balloond.pid, resource.RLIMIT_NOFILE, (40, 40))
    assert one.ask("acquire", 60, 5) == "0"
    device = await node.device()
    assert device.leased_bytes == 0
    assert one.ask("acquire", 2) == "2"


async def test_growth_beyond_the_descriptors_of_the_keeper_is_refused_and_the_keeper_stays_connected(node, child):
    node.kill(node.balloond)
    limit = capacity.descriptors([]) + 20
    resource.prlimit(node.keeper.pid, resource.RLIMIT_NOFILE, (limit, limit))
    await node.start_balloond()
    await node.book("a")
    one = child("a")
    assert one.ask("acquire", 30, 5) == "0", "so many are one request"
    assert extents_open(node.keeper) <= 20
    assert one.ask("acquire", 2) == "2"
    assert "there are descriptors for 20 extents" in node.log() and "keeper lost" not in node.log()


async def test_a_lease_whose_range_was_closed_still_receives_limits_and_takes_another_range(shared, child):
    await shared.book("a")
    one = child("a")
    one.ask("acquire", 3)
    assert one.ask("reopen") == "ok"
    await shared.until(kv(0))
    async with shared.client() as client:
        await client.set_limit(shared.name, "a", 5 * EXTENT)
    assert one.ask("acquire", 8) == "5"


async def test_limit_of_a_model_is_shared_by_its_two_engines(shared, child):
    await shared.book("a")
    one, other = child("a"), child("a")
    async with shared.client() as client:
        await client.set_limit(shared.name, "a", 10 * EXTENT)
    assert one.ask("acquire", 6) == "6"
    assert other.ask("acquire", 6) == "4"


async def test_devices_of_a_node_grant_memory_independently(tmp_path, node, child):
    node.kill(node.balloond)
    node.write_config(devices=(("cpu:0", 4 * MIB), ("cpu:1", 8 * MIB)))
    await node.start_balloond()
    await node.book("a", device="cpu:0")
    await node.book("a", device="cpu:1")
    one, other = child("a"), child("a", device="cpu:1")
    assert one.ask("acquire", 64) == "16"
    assert other.ask("acquire", 64) == "32"
    assert (await node.device("cpu:0")).free_bytes == (await node.device("cpu:1")).free_bytes == 0


async def test_an_address_without_memory_is_a_fault_and_one_with_fresh_memory_is_poisoned(shared, child):
    await shared.book("a")
    one = child("a")
    one.ask("acquire", 2)
    assert one.ask("touch", 0) == "255"
    one.tell("touch", one.ask("free_index"))
    assert await asyncio.to_thread(one.process.wait, 20) == -11
    await shared.until(lambda device: not device.leases)


def threads(pid):
    """The status of each thread of a process."""
    return [
        dict(re.findall(r"(\w+):\t(.*)", (task / "status").read_text())) for task in Path(f"/proc/{pid}/task").iterdir()
    ]


async def switches(pid):
    """How often the process's threads went to sleep by themselves, once all of them sleep."""
    while not all(task["State"].startswith("S") for task in threads(pid)):
        await asyncio.sleep(0)
    return sum(int(task["voluntary_ctxt_switches"]) for task in threads(pid))


async def test_idle_driver_wakes_no_thread_while_a_neighbour_grows(node, child):
    """Nobody polls: while a neighbour grows and shrinks, no thread of an idle engine wakes up."""
    await node.book("a", "b", "c")
    one, other, busy = child("a", 4, 8), child("b"), child("c", 4, 8)
    one.ask("acquire", 4)
    one.ask("usage", EXTENT)
    other.ask("acquire", 2)
    await node.until(kv(14))
    one.ask("release", 4)
    one.ask("empty")
    await node.until(kv(6))
    assert await asyncio.gather(one.asked("settle"), other.asked("settle")) == ["ok", "ok"]
    before = await switches(one.pid), await switches(other.pid)

    # Longer than any of a driver's times: its reserve grows, and shrinks after a second without growth.
    busy.ask("acquire", 20)
    busy.ask("release", 20)
    assert await busy.asked("settle") == "ok"
    await node.until(kv(6))
    assert (await switches(one.pid), await switches(other.pid)) == before
