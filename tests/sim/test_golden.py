import json

import pytest

from tests.sim import golden

KEPT = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize(("name", "seed"), golden.RUNS)
def test_a_simulated_result_of_a_fixed_seed_is_the_same_to_the_digit(name, seed):
    found = json.loads(json.dumps(golden.run(name, seed)))
    assert list(golden.differences(found, KEPT[f"{name} {seed}"])) == []


def test_golden_results_are_those_of_the_compared_runs():
    assert KEPT.keys() == {f"{name} {seed}" for name, seed in golden.RUNS}
