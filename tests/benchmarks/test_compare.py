"""Targets of the comparison on GPUs."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu import compare
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
