from dataclasses import fields
from pathlib import Path

import pytest

from sim.engines.cost import H200
from sim.fit import Results, compare, fit, solve

RESULTS = Results(Path(__file__).resolve().parents[2] / "benchmarks" / "results")


def test_fit_finds_the_numbers_of_an_h200():
    found = fit(RESULTS)
    for field in fields(H200):
        assert getattr(H200, field.name) == pytest.approx(getattr(found, field.name), rel=0.02), field.name


def test_fit_meets_half_of_held_out_measurements_within_5_and_the_rest_within_45_percent():
    errors = sorted(abs(line.error) for line in compare(RESULTS, H200) if not line.fitted)
    assert len(errors) >= 40
    assert errors[len(errors) // 2] < 0.05 and errors[-1] < 0.45


def test_solve_finds_the_root_of_a_rising_function():
    assert solve(lambda x: x * x - 2, 0.0, 2.0) == pytest.approx(2**0.5, abs=2e-3)
