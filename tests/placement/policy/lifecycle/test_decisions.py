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
def test_durations_of_wake_up_and_cold_start_are_measured_or_assumed(measured, taken):
    assert durations(*measured) == taken
