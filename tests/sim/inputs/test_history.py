"""The traffic before a slice."""

import pytest

from sim.inputs.catalogue import SHAPES, ModelSet, Spec
from sim.inputs.history import before, expected
from sim.inputs.request import SimulatedRequest
from sim.inputs.trace import Slice

MODELS = ModelSet([Spec("a", SHAPES["1b"])])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    lines = ["arrival_s,model,prompt_tokens,output_tokens", "100,a,999,999"]
    lines += ["3700,a,60,12", "3700.5,a,60,12", "3800,b,5,5", "5000,a,3000,456", "7250,a,999,999"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_traffic_before_a_slice_is_that_of_one_hour_and_of_the_catalogue_alone(trace):
    found = before(trace, MODELS, Slice(7200.0, 60.0))
    assert set(found) == {"a"}
    assert found["a"].tokens_per_s == pytest.approx((72 + 72 + 3456) / 3600)
    assert found["a"].returns_per_s == pytest.approx(2 / 3600)


def test_traffic_before_a_slice_at_a_higher_rate_has_as_many_more_tokens(trace):
    once, twice = (before(trace, MODELS, Slice(7200.0, 60.0, rate))["a"] for rate in (1.0, 2.0))
    assert twice.tokens_per_s == 2 * once.tokens_per_s and twice.returns_per_s == once.returns_per_s


def test_slice_without_a_whole_hour_before_it_has_no_history(trace):
    assert before(trace, MODELS, Slice(3599.0, 60.0)) == {}


def test_requests_within_a_second_are_one_return():
    requests = [SimulatedRequest("", "a", at, 10, 0) for at in (5.0, 5.0, 5.9, 7.0)]
    assert expected(requests, 10.0)["a"].returns_per_s == pytest.approx(0.2)
