"""The file of hourly traffic, and what is made of it at the start."""

import errno
import json
import os
from pathlib import Path

import pytest

from placement.planning import traffic_file
from placement.planning.traffic_record import TrafficRecord
from placement.policy.traffic import HOUR_S, TrafficCounts, TrafficHour

HOUR = 494_000
NOW = (HOUR + 0.5) * HOUR_S


class Clock:
    """The clock of the calendar and the time since a moment, in seconds."""

    at = NOW
    up = 5.0

    def __call__(self):
        return self.at

    def passes(self, seconds):
        self.at += seconds
        self.up += seconds

    def record(self, path):
        return TrafficRecord(path, self, lambda: self.up)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "traffic.json")


def hours(tokens=3600):
    return {HOUR - 1: TrafficHour(HOUR_S, {"a": TrafficCounts(10, tokens, 0, 36)})}


async def test_record_that_starts_again_expects_what_the_one_before_it_saw(path):
    clock = Clock()
    record = clock.record(path)
    assert record.expected == {}
    record.observe("a", TrafficCounts(4, 500, 100, 3))
    clock.passes(600.0)
    await record.write()
    after = clock.record(path).expected["a"]
    assert (after.tokens_per_s, after.returns_per_s) == (1.0, 0.005)


async def test_record_that_starts_again_knows_which_models_were_settled(path):
    clock = Clock()
    record = clock.record(path)
    assert record.settled == frozenset()
    record.follow(lambda: ["b", "a"])
    await record.write()
    again = clock.record(path)
    assert again.settled == {"a", "b"}
    await again.write()
    assert clock.record(path).settled == {"a", "b"}


def test_file_of_a_placement_that_knew_of_no_settled_models_is_read(path):
    with open(path, "wb") as file:
        file.write(b'{"version": 1, "hours": {}}')
    assert traffic_file.read(path) == ({}, frozenset())


async def test_record_adds_to_what_was_in_the_file(path):
    traffic_file.write(path, traffic_file.encoded(hours()))
    clock = Clock()
    record = clock.record(path)
    record.observe("a", TrafficCounts(1, 2, 3, 4))
    clock.passes(60.0)
    await record.write()
    there = traffic_file.read(path)[0]
    assert there[HOUR - 1] == hours()[HOUR - 1]
    assert there[HOUR] == TrafficHour(60.0, {"a": TrafficCounts(1, 2, 3, 4)})


@pytest.mark.parametrize("set_by_s", [-7200.0, 3 * HOUR_S, 30 * 24 * HOUR_S])
async def test_record_counts_no_hour_as_observed_by_a_clock_that_is_set(path, set_by_s):
    clock = Clock()
    record = clock.record(path)
    clock.passes(60.0)
    await record.write()
    clock.at += set_by_s
    clock.passes(60.0)
    await record.write()
    there = traffic_file.read(path)[0]
    assert sum(hour.observed_s for hour in there.values()) <= 120.0
    assert there[int(clock.at // HOUR_S)].observed_s == 60.0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        traffic_file.encoded(hours())[:-10],
        b"\xff\x00garbage",
        b"[]",
        json.dumps({"version": 2, "hours": {}}).encode(),
        json.dumps({"version": 1, "hours": {"x": {"observed_s": 1, "models": {}}}}).encode(),
        json.dumps({"version": 1, "hours": {"494000": {"observed_s": 1, "models": {"a": [1, -2, 3, 4]}}}}).encode(),
        json.dumps({"version": 1, "hours": {"494000": {"observed_s": 1, "models": {"a": [1, 2]}}}}).encode(),
        json.dumps({"version": 1, "hours": {"494000": {"observed_s": 9, "models": {"a": [1, 9**999, 1, 1]}}}}).encode(),
    ],
    ids=["empty", "truncated", "garbage", "a list", "another version", "no number", "negative", "few", "large"],
)
async def test_file_that_cannot_be_used_is_an_empty_history_and_is_replaced(path, content, capsys):
    with open(path, "wb") as file:
        file.write(content)
    clock = Clock()
    record = TrafficRecord(path, clock)
    assert record.expected == {}
    record.observe("a", TrafficCounts(1, 2, 3, 4))
    await record.write()
    assert traffic_file.read(path)[0][HOUR].models == {"a": TrafficCounts(1, 2, 3, 4)}


def test_file_that_is_missing_is_an_empty_history(path):
    assert traffic_file.read(path)[0] == {}


def test_file_of_another_version_is_called_so_whatever_its_shape(path, capsys):
    with open(path, "wb") as file:
        file.write(b'{"version": 2, "days": []}')
    assert traffic_file.read(path)[0] == {}
    assert "of another version" in "".join(capsys.readouterr())


async def test_file_that_cannot_be_read_is_an_empty_history_and_is_not_written_over(path, monkeypatch):
    traffic_file.write(path, traffic_file.encoded(hours()))

    def refused(file):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refused)
        record = Clock().record(path)
    assert record.expected == {}
    record.observe("b", TrafficCounts(1, 2, 3, 4))
    await record.write()
    assert traffic_file.read(path)[0] == hours()


async def test_full_disk_leaves_the_old_file_and_fails_nothing(path, monkeypatch):
    old = traffic_file.encoded(hours())
    traffic_file.write(path, old)

    def full(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    record = TrafficRecord(path, Clock())
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        await record.write()
        await record.write()
    with open(path, "rb") as file:
        assert file.read() == old
    assert os.listdir(os.path.dirname(path)) == ["traffic.json"]
    record.observe("b", TrafficCounts(1, 2, 3, 4))
    await record.write()
    assert "b" in traffic_file.read(path)[0][HOUR].models


async def test_folder_that_is_missing_fails_nothing(tmp_path):
    record = TrafficRecord(str(tmp_path / "gone" / "traffic.json"), Clock())
    record.observe("a", TrafficCounts(1, 2, 3, 4))
    await record.write()
    assert record.expected == {}


async def test_record_without_a_path_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = TrafficRecord("", Clock())
    record.observe("a", TrafficCounts(1, 2, 3, 4))
    await record.write()
    assert os.listdir(tmp_path) == []
