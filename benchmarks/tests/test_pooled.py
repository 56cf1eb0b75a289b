"""Several runs of a comparison as one."""

import pytest

from benchmarks.gpu.pairs import interval
from benchmarks.gpu.pooled import pooled


def run(ratios, part="one", commit="abc", load="28"):
    row = {"part": part, "load": load, "measure": "mean TPOT", "ratios": ratios, "failed": 1}
    return {"part": part, "circumstances": {"commit": commit}, "summary": [row]}


def test_windows_of_all_runs_are_one_sample():
    (row,) = pooled([run([1.0, 1.1]), run([0.9, 1.2])])
    expected = interval([1.0, 1.1, 0.9, 1.2])
    assert (row["ratio"], row["half"], row["runs"], row["failed"]) == (expected.mean, expected.half, 2, 2)


def test_loads_stay_apart():
    rows = pooled([run([1.0]), run([2.0], load="full")])
    assert [(row["load"], row["ratio"]) for row in rows] == [("28", 1.0), ("full", 2.0)]


@pytest.mark.parametrize("other", [run([1.0], part="two"), run([1.0], commit="abd")])
def test_runs_that_differ_are_not_mixed(other):
    with pytest.raises(ValueError, match="one part and one commit"):
        pooled([run([1.0]), other])
