"""Keeper, balloond and engines' drivers on one GPU: who has what, through growth, return and deaths."""

import asyncio
import signal
import subprocess
import sys

from tests.balloond.conftest import ROOT, Node
from tests.gpu.conftest import CAPACITY, DEVICE, GIVEN_OUT, MIB, SET_ASIDE, free_bytes, taken, until_free

KV, WEIGHTS = 8 * MIB, 64 * MIB


def leased(nbytes):
    return lambda device: device.leased_bytes == nbytes


def attached(device):
    return bool(device.leases) and not any(lease.suspended for lease in device.leases)


async def test_grown_memory_is_zero_and_keeps_what_is_written(node, child):
    await node.book("a", weights=3 * WEIGHTS)
    one = child("a")
    assert await one.asked("acquire", 8) == "8"
    assert one.ask("bytes_held") == "0"
    assert await one.asked("grow_weights", 2 * WEIGHTS + 100) == str(2 * WEIGHTS + 2 * MIB)
    assert one.ask("bytes_of_weights") == "0"
    one.ask("write", "x")
    one.ask("fill_weights", 5)
    assert (one.ask("read", "x"), one.ask("bytes_of_weights")) == ("same", "5")
    device = await node.device()
    assert device.capacity_bytes == GIVEN_OUT
    assert device.leased_bytes == 8 * KV + 2 * WEIGHTS + 2 * MIB


async def test_ledger_agrees_with_the_devices_free_memory(node, child):
    await node.book("a", "b")
    one, other = child("a"), child("b")
    before = free_bytes()
    for engine, count in ((one, 40), (other, 30)):
        assert await engine.asked("acquire", count) == str(count)
    assert (await node.device()).leased_bytes == 70 * KV
    await until_free(before - 70 * KV)  # once the spares that went into it are made anew
    assert one.ask("release", 25) == "ok"
    await node.until(leased(45 * KV))
    await until_free(before - 45 * KV)
    other.ask("detach")
    one.ask("release", 15)
    await node.until(leased(0))
    await until_free(before)


async def test_memory_that_one_engine_gave_back_comes_empty_to_another(node, child):
    await node.book("a", "b")
    one, other = child("a"), child("b")
    count = GIVEN_OUT // KV
    assert await one.asked("acquire", count) == str(count)
    one.ask("fill_held", 0xAB)
    assert one.ask("release", count) == "ok"
    await node.until(leased(0))
    assert await other.asked("acquire", count) == str(count)
    assert other.ask("bytes_held") == "0"


async def test_a_full_device_is_shared_by_reclaim(node, child):
    await node.book("a", "b")
    one, other = child("a"), child("b")
    count = GIVEN_OUT // KV
    assert await one.asked("acquire", count) == str(count)
    one.ask("usage", 0, f"60:{count * KV}")
    await node.until(lambda device: any(lease.kv_cached_bytes for lease in device.leases))
    other.tell("acquire", 10)
    assert await one.asked("wait_wake") == f"reclaim {10 * KV} overage 0"
    one.ask("release", 10)
    one.ask("reclaimed")
    assert await asyncio.to_thread(other.answer) == "10"
    assert other.ask("bytes_held") == "0"


async def test_an_extent_leaves_only_when_the_work_before_its_release_is_done(node, child):
    await node.book("a")
    one = child("a")
    assert await one.asked("acquire", 6) == "6"
    one.ask("hold_up")
    one.ask("release", 6)
    one.ask("usage", 0)
    assert one.ask("mapped") == str(6 * KV)
    assert (await node.device()).leased_bytes == 6 * KV
    one.ask("go_on")
    await node.until(leased(0))
    assert one.ask("mapped") == "0"


async def test_fresh_memory_is_poisoned_when_asked_for(node, child):
    await node.book("a")
    one = child("a")
    one.ask("poisoned")
    assert await one.asked("acquire", 3) == "3"
    assert one.ask("bytes_held") == "255"


async def test_a_killed_engines_memory_comes_back_when_it_is_dead_and_not_before(node, child):
    await node.book("a", weights=WEIGHTS)
    empty = free_bytes()
    one = child("a")
    assert await one.asked("acquire", 20) == "20"
    one.ask("grow_weights", WEIGHTS)
    one.process.send_signal(signal.SIGSTOP)
    node.kill(node.balloond)
    await node.start_balloond()
    assert (await node.device()).leased_bytes == 20 * KV + WEIGHTS
    assert taken(empty) >= 20 * KV + WEIGHTS
    one.kill()
    await node.until(lambda device: device.leased_bytes == 0 and not device.leases)
    await until_free(empty)


async def test_engines_keep_their_memory_while_balloond_is_killed_and_restarted(node, child):
    await node.book("a", "b", weights=WEIGHTS)
    one, other = child("a"), child("b")
    assert await one.asked("acquire", 12) == "12"
    assert await other.asked("acquire", 5) == "5"
    other.ask("grow_weights", WEIGHTS)
    one.ask("write", "one")
    other.ask("fill_weights", 77)
    before = await node.device()
    node.kill(node.balloond)
    assert (one.ask("read", "one"), other.ask("bytes_of_weights")) == ("same", "77")
    await node.start_balloond()
    after = await node.until(attached)
    assert (after.capacity_bytes, after.leased_bytes, after.stranded_bytes) == (
        GIVEN_OUT,
        before.leased_bytes,
        0,
    )
    assert (one.ask("read", "one"), other.ask("bytes_of_weights")) == ("same", "77")
    assert await one.asked("acquire", 4) == "4"
    assert one.ask("release", 16) == "ok"
    await node.until(leased(5 * KV + WEIGHTS))


async def test_restarted_keeper_is_given_all_extents_again(node, child):
    await node.book("a")
    one = child("a")
    assert await one.asked("acquire", 9) == "9"
    one.ask("write", "x")
    node.kill(node.keeper)
    await node.start_keeper()
    assert await one.asked("acquire", 1) == "1"  # granted only when the new keeper has it, and so everything before
    node.kill(node.balloond)
    await node.start_balloond()
    device = await node.until(attached)
    assert (device.leased_bytes, device.stranded_bytes) == (10 * KV, 0)


async def test_memory_with_keeper_and_balloond_killed_is_stranded_until_it_is_given_back(node, child):
    await node.book("a")
    empty = free_bytes()
    one = child("a")
    assert await one.asked("acquire", 9) == "9"
    one.ask("write", "x")
    node.kill(node.balloond)
    node.kill(node.keeper)
    await node.start()
    device = await node.until(lambda device: device.stranded_bytes > 0)
    assert (device.capacity_bytes, device.stranded_bytes, device.leased_bytes) == (GIVEN_OUT, 9 * KV, 0)
    assert one.ask("read", "x") == "same"
    one.ask("release", 9)
    device = await node.until(lambda device: device.stranded_bytes == 0)
    assert device.free_bytes == GIVEN_OUT
    one.kill()
    await node.until(lambda device: not device.leases)
    await until_free(empty)


def test_balloond_takes_no_memory_for_itself_but_the_spares(tmp_path):
    before = free_bytes()
    node = Node(tmp_path, devices=[(DEVICE, CAPACITY)])
    node.config.write_text(node.config.read_text() + f"\nspare_bytes = {SET_ASIDE - 2 * MIB}\n")

    async def look():
        await node.start()
        while taken(before) < SET_ASIDE:
            await asyncio.sleep(0.01)
        assert taken(before) == SET_ASIDE
        node.kill(node.balloond)
        await until_free(before)

    try:
        asyncio.run(asyncio.wait_for(look(), 30))
    finally:
        node.end()


def test_a_capacity_that_is_not_free_ends_with_one_line(tmp_path):
    node = Node(tmp_path, devices=[(DEVICE, 1 << 40)])

    async def ended():
        await node.start_keeper()
        return await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "balloond", "--config", str(node.config)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
        )

    try:
        over = asyncio.run(ended())
    finally:
        node.end()
    assert over.returncode == 1
    (line,) = [line for line in over.stderr.splitlines() if line.startswith("balloond: ")]
    assert line.startswith(f"balloond: {DEVICE}: capacity_bytes is {1 << 40}, but ")


def test_a_capacity_that_is_left_out_is_what_is_free_less_the_reserve(tmp_path):
    before = free_bytes()
    node = Node(tmp_path, devices=[(DEVICE, 1)])
    node.name = DEVICE
    node.config.write_text(node.config.read_text().replace("capacity_bytes = 1", f"reserve_bytes = {2048 * MIB}"))

    async def device():
        await node.start()
        return await node.device()

    try:
        found = asyncio.run(device())
    finally:
        node.end()
    assert 0 <= before - 2048 * MIB - (found.capacity_bytes + 130 * MIB) < 2 * MIB
