"""Two sides in turns, each with a clock that stands while the other runs."""

import asyncio
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.turns import Clock, Processes, order, take
from services.runtime import tasks
from testing.patience import PATIENCE_S


class Wall:
    def __init__(self):
        self.at = 100.0

    def __call__(self):
        return self.at


def test_a_clock_counts_only_while_its_side_runs():
    wall = Wall()
    clock = Clock(wall)
    assert clock.now() == 0.0 and not clock.running
    clock.start()
    wall.at = 103.0
    assert clock.now() == 3.0
    clock.stop()
    wall.at = 110.0
    assert clock.now() == 3.0
    clock.start()
    wall.at = 112.0
    assert clock.now() == 5.0 and clock.running


def test_any_moment_of_the_past_has_its_time_on_the_clock():
    wall = Wall()
    clock = Clock(wall)
    for start, stop in ((100.0, 103.0), (110.0, 111.0)):
        wall.at = start
        clock.start()
        wall.at = stop
        clock.stop()
    assert [clock.at(when) for when in (99.0, 100.0, 101.5, 103.0, 107.0, 110.5, 111.0, 200.0)] == [
        *(0.0, 0.0, 1.5, 3.0, 3.0, 3.5, 4.0, 4.0)
    ]


async def test_a_time_is_reached_only_while_the_side_runs():
    clock = Clock()
    waiting = tasks.spawn(clock.reach(0.02), "reach")
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.start()
    await waiting
    assert clock.now() >= 0.02


def test_each_side_goes_first_in_every_other_pair():
    assert list(order(8)) == [0, 1, 1, 0, 0, 1, 1, 0]


def ticks(path):
    return len(path.read_bytes()) if path.exists() else 0


async def test_a_side_does_nothing_while_it_is_the_others_turn(tmp_path):
    code = (
        "import os, sys\nf = os.open(sys.argv[1], os.O_CREAT | os.O_APPEND | os.O_WRONLY)\nwhile 1: os.write(f, b'.')"
    )
    logs = [tmp_path / name for name in ("first", "second")]
    children = [subprocess.Popen([sys.executable, "-c", code, str(log)]) for log in logs]
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not all(map(ticks, logs)):
                await asyncio.sleep(0.01)
        sides = [Processes([child.pid]) for child in children]
        clocks = [Clock(), Clock()]
        for side in sides:
            side.stop()
        while any(state(child) != "T" for child in children):
            await asyncio.sleep(0.001)
        before = [ticks(log) for log in logs]
        taken = 0
        while taken == 0 or not all(ticks(log) > count for log, count in zip(logs, before, strict=True)):
            await take(clocks, sides, 0.05, 4)  # on a busy machine a side may not get a core in its turns
            taken += 1
        assert [clock.running for clock in clocks] == [False, False]
        assert all(clock.now() > 0.09 * taken for clock in clocks)
        sides[0].go_on()
        clocks[0].start()
        while any(state(child) == "T" for child in children[:1]):
            await asyncio.sleep(0.001)
        stood = ticks(logs[1])
        ran = ticks(logs[0])
        while ticks(logs[0]) == ran:
            await asyncio.sleep(0.001)
        assert ticks(logs[1]) == stood
    finally:
        for child in children:
            child.kill()
            child.wait()


def state(child):
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
