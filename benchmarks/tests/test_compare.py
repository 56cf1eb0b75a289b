"""Targets of the comparison on GPUs, and where its models began."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import compare, compared
from benchmarks.gpu.slices import TPOT_SCALE, TTFT_SCALE
from benchmarks.systems import Model


def test_targets_are_those_of_the_models_that_were_asked_for_something() -> None:
    alone = {name: {"ttft_ms": 20.0, "tpot_ms": 3.0} for name in ("a", "b")}
    models = [Model(name, Path(name), 8192) for name in ("b", "c")]
    assert compare.scaled(alone, models) == {"b": {"ttft_ms": 20.0 * TTFT_SCALE, "tpot_ms": 3.0 * TPOT_SCALE}}


def test_of_two_calibrations_a_host_that_stood_still_in_one_of_them_does_not_count() -> None:
    one = {"busy": {"a": {"ttft_ms": 480.0, "tpot_ms": 3.0}, "b": {"ttft_ms": 20.0}}}
    other = {"busy": {"a": {"ttft_ms": 40.0, "tpot_ms": 3.5}, "b": {"ttft_ms": 21.0}}}
    assert compare.smallest([one, other]) == {"busy": {"a": {"ttft_ms": 40.0, "tpot_ms": 3.0}, "b": {"ttft_ms": 20.0}}}


def test_a_calibration_that_was_cut_off_goes_on_and_no_targets_are_made_of_it_before(tmp_path) -> None:
    rows = [[0.0, "a", 10, 5, 0.02, 0.003], [1.0, "a", 10, 5, 0.04, 0.005]]
    took = compare.Alone(tmp_path, 1, "abc").put("busy", "a", rows)
    with pytest.raises(SystemExit, match="calibrate first"):
        compare.targets(tmp_path, "abc")
    again = compare.Alone(tmp_path, 1, "abc")
    assert again.has("busy", "a") and not again.has("busy", "b") and not again.has("quiet", "a")
    again.put("busy", "b", rows[:1])
    again.whole()
    compare.targets(tmp_path, "abc")
    slos = json.loads((tmp_path / "slos.json").read_text())["slos"]
    assert slos == {"busy": {"a": took, "b": {"ttft_ms": 20.0, "tpot_ms": 3.0}}}


def test_slices_that_have_targets_keep_them_when_others_were_measured_later(tmp_path) -> None:
    row = [[0.0, "a", 10, 5, 0.02, 0.003]]
    compare.Alone(tmp_path, 1, "abc").put("busy", "a", row)
    compare.Alone(tmp_path, 1, "abc").whole()
    compare.targets(tmp_path, "abc")
    (tmp_path / "alone-1.json").unlink()
    later = compare.Alone(tmp_path, 1, "def")
    later.put("busy", "a", [[0.0, "a", 10, 5, 0.01, 0.001]])
    took = later.put("quiet", "a", row)
    later.whole()
    compare.targets(tmp_path, "def")
    found = json.loads((tmp_path / "slos.json").read_text())
    assert found["slos"] == {"busy": {"a": {"ttft_ms": 20.0, "tpot_ms": 3.0}}, "quiet": {"a": took}}
    assert len(found["samples"]) == 2


@pytest.mark.parametrize("known", [{}, {"busy": {}}])
async def test_a_run_of_a_slice_without_targets_says_so_before_anything_is_started(tmp_path, known) -> None:
    if known:
        (tmp_path / "slos.json").write_text(json.dumps({"slos": known}))
    given = compare.parse(["run", "prism:quiet:2", "--traces", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="no targets of quiet: calibrate first"):
        await compare.run(given, [], compared.site(["cpu:0", "cpu:1"], 8, 1 << 30, "echo"))


def test_where_models_were_at_first_is_where_they_were_awake_or_else_asleep() -> None:
    def row(at_s: float, group: str, **models: str) -> dict[str, object]:
        return {"at_s": at_s, "group": group, "models": {name: {"residency": of} for name, of in models.items()}}

    rows = [
        row(0.0, "cuda:0", a="active", b="hibernating", d="waking"),
        row(0.1, "cuda:1", a="hibernating", b="active", c="hibernating"),
        row(0.5, "cuda:1", c="active", a="active"),
    ]
    assert compared.at_first(rows) == {"a": "cuda:0", "b": "cuda:1", "c": "cuda:1"}


def test_weights_come_to_a_gpu_when_a_model_wakes_there_or_is_new_there() -> None:
    def row(at_s: float, group: str, **models: tuple[str, int]) -> dict[str, object]:
        told = {name: {"residency": of, "hibernations": sleeps} for name, (of, sleeps) in models.items()}
        return {"at_s": at_s, "group": group, "models": told}

    rows = [
        row(0.0, "cuda:0", a=("active", 3), b=("hibernating", 1), c=("active", 0)),
        row(0.0, "cuda:1"),
        row(0.5, "cuda:0", a=("active", 5), b=("waking", 1), c=("hibernating", 1)),  # a slept and woke twice
        row(0.5, "cuda:1", a=("active", 0)),
        row(1.0, "cuda:0", b=("active", 1), c=("hibernating", 2)),  # a has left; c woke and slept again
        row(1.0, "cuda:1", a=("active", 0), d=("hibernating", 1)),
    ]
    assert compared.came_up(rows) == {"a": 2 + 1, "b": 1, "c": 1, "d": 1}
