"""What the public code of Prism's authors does. worlds.ROUND has the numbers."""

import pytest

from sim.inputs.request import SimulatedRequest
from tests.sim.worlds import GB, models, replay


def requests_of(*rows):
    """(model, arrival, prompt, output, ttft target)"""
    return [SimulatedRequest(str(i), *row) for i, row in enumerate(rows)]


def test_least_slack_serves_the_request_with_less_time_left_first():
    crowd = [("a", 5.0, 2000, 1, 90.0)] * 30
    requests = requests_of(("a", 0.0, 1, 1, 90.0), *crowd, ("a", 5.1, 2000, 1, 20.0))
    replay(requests, models("a"), "least_slack")
    urgent = requests[-1]
    before = [request for request in requests[1:-1] if request.first_at <= urgent.first_at]
    assert 11 <= len(before) < 20  # those that the engine had


def test_least_slack_hibernates_an_idle_model_although_its_memory_is_not_needed():
    requests = requests_of(("a", 0.0, 100, 1, 9.0), ("a", 30.0, 100, 1, 9.0), ("a", 100.0, 100, 1, 9.0))
    outcome = replay(requests, models("a"), "least_slack")
    (group,) = outcome.system.groups
    assert group.counts.hibernations == 1 and group.counts.wakes == 1
    assert requests[1].ttft == pytest.approx(0.05 + 0.2) and requests[2].ttft == pytest.approx(0.05 + 0.3 + 0.2)


def test_least_slack_activates_models_on_the_group_with_the_most_memory():
    requests = requests_of(
        ("large", 0.0, 10, 1, 9.0), ("a", 10.0, 100, 1, 9.0), ("b", 20.0, 100, 1, 9.0), ("c", 30.0, 100, 1, 9.0)
    )
    known = models("a", "b", "c", large={"large": 80 * GB})
    outcome = replay(requests, known, "least_slack", (1, 1))
    assert [sorted(group.active) for group in outcome.system.groups] == [["large"], ["a", "b", "c"]]


def test_least_slack_moves_the_model_with_fewer_requests_to_a_group_without_any():
    rows = [("large", 0.0, 10, 1, 9.0)]
    rows += [("often", 10.0 + 2.0 * i, 10, 500, 9.0) for i in range(60)]
    rows += [("seldom", 11.0 + 10.0 * i, 10, 500, 9.0) for i in range(12)]
    requests = requests_of(*sorted(rows, key=lambda row: row[1]))
    known = models("often", "seldom", weights=5 * GB, large={"large": 80 * GB})
    outcome = replay(requests, known, "least_slack", (1, 1))
    # Both came up beside each other because the large model had the other group, until it was idle for 50 s.
    assert [sorted(group.active) for group in outcome.system.groups] == [["seldom"], ["often"]]
    assert outcome.system.figures["migrations"] == 1 and all(request.served for request in requests)


def test_least_slack_lets_a_model_without_room_wait_until_another_has_left():
    requests = requests_of(("a", 0.0, 10, 1, 9.0), ("b", 10.0, 10, 1, 90.0))
    outcome = replay(requests, models("a", "b", weights=80 * GB), "least_slack")
    # a leaves in the first round in which it has been idle for 50 s.
    assert 50 < requests[1].first_at < 70 and requests[1].served
    (group,) = outcome.system.groups
    assert sorted(group.active) == ["b"]
