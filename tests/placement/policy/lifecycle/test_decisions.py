import pytest

from placement.policy.lifecycle.decisions import durations


@pytest.mark.parametrize(
    ("measured", "taken"),
    [
        ((0.0, 0.0), (1.0, 30.0)),
        ((0.2, 12.0), (0.2, 12.0)),
        ((0.0, 12.0), (1.0, 12.0)),
        ((0.0, 0.5), (0.5, 0.5)),  # a wake-up takes no longer than a cold start
    ],
)
def test_a_wake_up_and_a_cold_start_last_as_measured_and_until_then_as_assumed(measured, taken):
    assert durations(*measured) == taken
