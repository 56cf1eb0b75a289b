"""The same piece of work again and again, beside whatever else runs."""

import os

from benchmarks import host_pulse
from benchmarks.host_pulse import Cores, HostPulse, summary


def test_a_summary_has_quantiles_in_milliseconds_of_each_of_three():
    found = summary([(0.001 * i, 0.002 * i, 0.0005 * i) for i in range(1, 101)])
    assert found["beats"] == 100
    assert found["late_ms"] == {"p5": 5.0, "p50": 50.0, "p95": 95.0}
    assert found["work_ms"] == {"p5": 10.0, "p50": 100.0, "p95": 190.0}
    assert found["cpu_ms"] == {"p5": 2.5, "p50": 25.0, "p95": 47.5}


def test_of_no_beats_nothing_is_said_but_their_number():
    assert summary([]) == {"beats": 0}


def test_the_work_is_the_same_every_time():
    assert host_pulse.work() == host_pulse.work() > 0


def test_beats_are_measured_until_the_input_ends(monkeypatch):
    read, write = os.pipe()
    beats = []

    def beat():
        beats.append(len(beats))
        if len(beats) == 3:
            os.close(write)
        return 0.002, 0.001

    monkeypatch.setattr(host_pulse, "beat", beat)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(host_pulse.sys, "stdin", stdin)
        found = host_pulse.until_input_ends(0.001)
    assert found["beats"] == len(beats) == 3
    assert (found["work_ms"]["p50"], found["cpu_ms"]["p50"]) == (2.0, 1.0)
    ((began_s, work_ms, worked, stolen),) = found["by_time"]
    assert (began_s, work_ms) == (0.0, 2.0)
    assert 0 <= worked <= 1 and 0 <= stolen <= 1


def test_each_window_has_a_row_of_its_own(monkeypatch):
    read, write = os.pipe()
    took = iter((0.002, 0.004, 0.008))

    def beat():
        wall = next(took)
        if wall == 0.008:
            os.close(write)
        return wall, 0.001

    monkeypatch.setattr(host_pulse, "beat", beat)
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(host_pulse.sys, "stdin", stdin)
        found = host_pulse.until_input_ends(0.001, window_s=0.0)
    assert [row[1] for row in found["by_time"]] == [2.0, 4.0, 8.0]
    assert found["by_time"] == sorted(found["by_time"])


def test_shares_of_cores_are_of_the_time_between_two_looks(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(host_pulse, "_STAT", stat)
    stat.write_text("cpu  10 1 5 80 2 1 1 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    before = Cores.now()
    assert before == (18, 0, 100)
    stat.write_text("cpu  40 1 15 130 2 1 1 10 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert Cores.now().shares_since(before) == (0.4, 0.1)
    assert before.shares_since(before) == (0.0, 0.0)


async def test_it_measures_while_the_block_runs_and_tells_afterwards():
    async with HostPulse(every_s=60.0) as pulse:
        assert pulse.found == {}
    assert pulse.found == {"beats": 0, "by_time": []}


async def test_one_that_died_has_found_nothing():
    async with HostPulse() as pulse:
        pulse._process.kill()
    assert pulse.found == {}
