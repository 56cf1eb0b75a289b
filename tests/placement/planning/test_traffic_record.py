"""The file of hourly traffic, and what is made of it at the start."""

import errno
import json
import os

import pytest

from placement.planning import traffic_file
from placement.planning.traffic_record import TrafficRecord
from placement.policy.traffic import HOUR_S, TrafficCounts, TrafficHour

HOUR = 494_000
NOW = (HOUR + 0.5) * HOUR_S


class Clock:
    at = NOW

    def __call__(self):
        return self.at


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "traffic.json")


def hours(tokens=3600):
    return {HOUR - 1: TrafficHour(HOUR_S, {"a": TrafficCounts(10, tokens, 0, 36)})}


async def test_record_that_starts_again_expects_what_the_one_before_it_saw(path):
    clock = Clock()
    record = TrafficRecord(path, clock)
    assert record.expected == {}
    record.observe("a", TrafficCounts(4, 500, 100, 3))
    clock.at += 600.0
    await record.write()
    after = TrafficRecord(path, clock).expected["a"]
    assert (after.tokens_per_s, after.returns_per_s) == (1.0, 0.005)


async def test_record_adds_to_what_was_in_the_file(path):
    traffic_file.write(path, traffic_file.encoded(hours()))
    clock = Clock()
    record = TrafficRecord(path, clock)
    record.observe("a", TrafficCounts(1, 2, 3, 4))
    clock.at += 60.0
    await record.write()
    there = traffic_file.read(path)
    assert there[HOUR - 1] == hours()[HOUR - 1]
    assert there[HOUR] == TrafficHour(60.0, {"a": TrafficCounts(1, 2, 3, 4)})


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
    ],
    ids=["empty", "truncated", "garbage", "a list", "another version", "no number", "negative", "too few"],
)
async def test_file_that_cannot_be_used_is_an_empty_history_and_is_replaced(path, content, capsys):
    with open(path, "wb") as file:
        file.write(content)
    clock = Clock()
    record = TrafficRecord(path, clock)
    assert record.expected == {}
    record.observe("a", TrafficCounts(1, 2, 3, 4))
    await record.write()
    assert traffic_file.read(path)[HOUR].models == {"a": TrafficCounts(1, 2, 3, 4)}


def test_file_that_is_missing_or_a_folder_is_an_empty_history(tmp_path):
    assert traffic_file.read(str(tmp_path / "missing.json")) == {}
    assert traffic_file.read(str(tmp_path)) == {}


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
    assert "b" in traffic_file.read(path)[HOUR].models


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
