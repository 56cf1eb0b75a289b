"""A fleet that is drawn: the same for the same seed, with a long tail, and readable."""

import sys
from collections import Counter

import pytest

from sim.inputs import catalogue, trace
from sim.policies import SYSTEMS
from sim.replay import Replay
from sim.synthetic import LongTail, main, shapes, write


def drawn(folder, **facts):
    folder.mkdir(exist_ok=True)
    tail = LongTail(**{"models": 60, "rate": 20.0, "seconds": 300.0, "kinds": shapes("1b=3,8b"), **facts})
    count = write(tail, folder / "trace.csv.gz", folder / "models.toml")
    known = catalogue.read(folder / "models.toml")
    return count, known, trace.read(folder / "trace.csv.gz", known, trace.Slice())


def test_synthetic_fleet_files_are_equal_for_equal_seeds_only(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        drawn(tmp_path / name, seed=seed)
    for file in ("trace.csv.gz", "models.toml"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def test_synthetic_fleet_has_a_long_tail_and_about_the_requested_rate(tmp_path):
    count, known, read = drawn(tmp_path, seconds=3600.0, burst_s=30.0)
    by_model = Counter(request.model for request in read.requests).most_common()
    assert count == len(read.requests) == pytest.approx(20 * 3600, rel=0.2)
    assert sum(n for _, n in by_model[:12]) > count / 2 and len(by_model) == 60
    shapes_seen = Counter(known.find(f"m{i:05}").shape.weights_bytes for i in range(60))
    assert sorted(shapes_seen.values()) == [15, 45]


def test_synthetic_requests_of_a_model_come_in_bursts(tmp_path):
    _, _, read = drawn(tmp_path, models=1, rate=2.0, seconds=36_000.0, busy=0.2, burst_s=60.0)
    seconds_with = len({int(request.arrival // 60) for request in read.requests})
    assert 0.15 < seconds_with / 600 < 0.5


def test_synthetic_models_of_four_and_eight_devices_run_on_groups_of_as_many(tmp_path):
    _, known, read = drawn(tmp_path, models=12, rate=2.0, seconds=60.0, busy=1.0, kinds=shapes("8b=4,70b/4=1,70b/8=1"))
    outcome = Replay(read, known, [1, 1, 4, 8], SYSTEMS["prism"], progress=lambda line: None).run()
    assert all(request.served for request in read.requests)
    assert {group.devices for group in outcome.system.groups if group.counts.cold_starts} == {1, 4, 8}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--models", "0"), "there has to be a model, not 0"),
        (("--rate", "0"), "rate has to be above zero, not 0"),
        (("--rate", "nan"), "rate has to be above zero, not nan"),
        (("--seconds", "inf"), "seconds has to be above zero, not inf"),
        (("--busy", "1.5"), "busy has to be above 0 and at most 1, not 1.5"),
        (("--skew", "-1"), "skew has to be zero or more, not -1"),
        (("--shapes", "9b=1"), "'9b=1': no shape '9b'; there are 1b, "),
        (("--shapes", "8b/x=1"), "'x' is not a number of devices"),
        (("--shapes", "8b=many"), "'many' is not a number above zero"),
        (("--trace", "/nowhere/trace.csv"), "No such file"),
    ],
)
def test_synthetic_fleet_with_bad_options_is_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments, said):
    files = ["--trace", str(tmp_path / "t.csv"), "--catalogue", str(tmp_path / "m.toml")]
    monkeypatch.setattr(sys, "argv", ["x", "--models", "2", "--rate", "1", "--seconds", "9", *files, *arguments])
    assert main() == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1
