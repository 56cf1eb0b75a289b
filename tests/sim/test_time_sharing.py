"""QLM and ServerlessLLM: a group is one model's at a time. worlds.ROUND has the numbers."""

import pytest

from sim.inputs.request import SimulatedRequest
from sim.system import FleetError
from tests.sim.worlds import GB, ROUND, models, replay

COLD, WAKE, PATH, FIRST = 2.0, 0.3, 0.05, 0.2
"""Seconds; FIRST: a prefill of 100 tokens."""


def requests_of(*rows):
    """(model, arrival, prompt, output, ttft target)"""
    return [SimulatedRequest(str(i), *row) for i, row in enumerate(rows)]


def active(outcome):
    return [sorted(group.active) for group in outcome.system.groups]


# --- what both do


@pytest.mark.parametrize("policy", ["qlm", "serverlessllm"])
def test_time_sharing_models_take_turns_on_a_group_and_come_back_from_hibernation(policy):
    first, second, third = requests = requests_of(
        ("a", 0.0, 100, 1, 9.0), ("b", 10.0, 100, 1, 9.0), ("a", 20.0, 100, 1, 9.0)
    )
    outcome = replay(requests, models("a", "b"), policy)
    assert first.ttft == pytest.approx(PATH + COLD + FIRST)
    assert second.ttft == pytest.approx(PATH + 0.01 + COLD + FIRST)
    assert third.ttft == pytest.approx(PATH + 0.01 + WAKE + FIRST)
    (group,) = outcome.system.groups
    assert (group.counts.cold_starts, group.counts.wakes, group.counts.hibernations) == (2, 1, 2)
    assert active(outcome) == [["a"]] and outcome.system.figures["swaps"] == 2


@pytest.mark.parametrize("policy", ["qlm", "serverlessllm"])
def test_time_sharing_starts_all_requests_of_the_active_model_at_once(policy):
    requests = requests_of(*(("a", 0.0, 1, 50, 9.0) for _ in range(300)))
    replay(requests, models("a"), policy)
    assert ROUND.most_running < 300 and max(r.first_at for r in requests) < min(r.ended_at for r in requests)


@pytest.mark.parametrize("policy", ["qlm", "serverlessllm"])
def test_time_sharing_sends_sleeping_models_cold_least_recently_used_first(policy):
    names = "abcdefgh"
    requests = requests_of(*((name, 10.0 * i, 100, 1, 9.0) for i, name in enumerate([*names, "b", "a"])))
    known = models(*names, weights=145 * GB)  # beside a model, five sleepers of 0.6 GB have room
    outcome = replay(requests, known, policy, patience_s=4e4)
    (group,) = outcome.system.groups
    sleep = {name for name, resident in group.residents.items() if resident.asleep}
    assert all(request.served for request in requests)
    assert group.counts.gone_cold > 0 and "c" not in sleep and {"b", "h"} <= sleep and active(outcome) == [["a"]]


@pytest.mark.parametrize("policy", ["qlm", "serverlessllm", "least_slack"])
def test_time_sharing_uses_a_group_of_the_size_of_a_model_and_refuses_unknown_settings(policy):
    (request,) = requests = requests_of(("wide", 0.0, 100, 11, 9.0))
    wide = models("wide", devices=2, weights=2 * GB)
    assert active(replay(requests, wide, policy, (1, 2))) == [[], ["wide"]] and request.served
    with pytest.raises(FleetError, match="wide is for a group of 2 devices"):
        replay(requests, wide, policy, (1, 1))
    with pytest.raises(FleetError, match=f"{policy} has no setting speed"):
        replay(requests, wide, policy, (2,), settings={"speed": "1"})
    with pytest.raises(FleetError, match="has to be a number, zero or more, not 'soon'"):
        replay(
            requests,
            wide,
            policy,
            (2,),
            settings={"idle_s" if policy == "least_slack" else "patience_s": "soon"}
            if policy != "qlm"
            else {"stay_s": "soon"},
        )


# --- QLM


def test_qlm_swap_preempts_a_running_request_which_still_ends():
    long, urgent = requests = requests_of(("a", 0.0, 100, 2001, 3.0), ("b", 10.0, 100, 1, 4.0))
    outcome = replay(requests, models("a", "b"), "qlm")
    assert outcome.system.figures["preempted"] == 1 and long.generated == 2001 and long.served
    assert urgent.first_at < long.ended_at and 2.0 < urgent.ttft <= 4.0 + FIRST  # as late as it may
    (group,) = outcome.system.groups
    assert group.counts.wakes == 1  # a, again
    alone = PATH + COLD + FIRST + 2000 * 0.01
    assert long.ended_at > alone + COLD  # b's time on the group, and a's KV once more


def test_qlm_request_groups_of_the_present_model_go_first_while_another_can_wait():
    requests = requests_of(
        ("a", 0.0, 100, 501, 9.0), ("b", 3.0, 100, 1, 30.0), ("a", 3.1, 100, 1, 60.0), ("a", 3.2, 100, 1, 60.0)
    )
    outcome = replay(requests, models("a", "b"), "qlm")
    _, other, second, third = requests
    assert second.first_at < other.first_at and third.first_at < other.first_at
    assert outcome.system.figures["preempted"] == 0  # b waits for a's last request: it has the time


def test_qlm_virtual_queue_is_in_order_of_deadline_not_of_arrival():
    requests = requests_of(
        ("a", 0.0, 100, 1001, 9.0), ("b", 3.0, 100, 1, 300.0), ("c", 3.1, 100, 1, 100.0), ("a", 3.2, 100, 1, 9.0)
    )
    replay(requests, models("a", "b", "c"), "qlm")
    assert requests[2].first_at < requests[1].first_at


@pytest.mark.parametrize(("aware", "swaps"), [("0", 5), ("1", 0)])
def test_qlm_swaps_on_idle_groups_unless_it_is_swap_aware(aware, swaps):
    rows = [("ab"[i % 2], 10.0 * i, 100, 1, 9.0) for i in range(6)]
    outcome = replay(requests_of(*rows), models("a", "b"), "qlm", (1, 1), settings={"swap_aware": aware})
    assert outcome.system.figures["swaps"] == swaps


# --- ServerlessLLM


def test_serverlessllm_starts_a_model_on_the_group_where_it_starts_fastest():
    requests = requests_of(
        ("a", 0.0, 100, 1, 9.0), ("b", 10.0, 100, 1, 9.0), ("c", 20.0, 100, 1, 9.0), ("a", 30.0, 100, 1, 9.0)
    )
    outcome = replay(requests, models("a", "b", "c"), "serverlessllm", (1, 1))
    # c took the group unused longest, a's; a goes back to where it sleeps, although b has been idle for longer.
    assert requests[3].ttft == pytest.approx(PATH + 0.01 + WAKE + FIRST)
    assert active(outcome) == [["a"], ["b"]]


def test_serverlessllm_preempts_no_running_request_and_a_waiting_model_gets_a_drained_group():
    requests = requests_of(("a", 0.0, 100, 1001, 9.0), ("b", 3.0, 100, 1, 9.0), ("a", 5.0, 100, 1, 9.0))
    outcome = replay(requests, models("a", "b"), "serverlessllm")
    long, waits, late = requests
    assert long.ended_at == pytest.approx(PATH + COLD + FIRST + 10.0) and long.parked == 0
    assert long.ended_at < waits.first_at < late.first_at  # a takes no more requests once b has waited a second
    assert outcome.system.figures["swaps"] == 2


def test_serverlessllm_with_infinite_patience_leaves_a_group_to_a_model_that_is_never_idle():
    requests = requests_of(("a", 0.0, 100, 1001, 9.0), ("b", 3.0, 100, 1, 9.0), ("a", 5.0, 100, 1, 9.0))
    outcome = replay(requests, models("a", "b"), "serverlessllm", settings={"patience_s": "inf"})
    assert requests[2].first_at < requests[0].ended_at < requests[1].first_at
    assert outcome.system.figures["swaps"] == 1


def test_serverlessllm_keeps_an_idle_model_until_its_keep_alive_is_over():
    requests = requests_of(("a", 0.0, 100, 1, 9.0), ("a", 5.0, 100, 1, 9.0), ("a", 30.0, 100, 1, 9.0))
    replay(requests, models("a"), "serverlessllm", settings={"keep_alive_s": "10"})
    assert requests[1].ttft == pytest.approx(PATH + FIRST)
    assert requests[2].ttft == pytest.approx(PATH + WAKE + FIRST)


@pytest.mark.parametrize("idle_s", [0.0, 0.01, 0.05, 0.3, 0.5])
def test_serverlessllm_group_is_free_after_the_configured_idle_time_of_its_model(idle_s):
    rows = ("a", 0.0, 100, 1, 9.0), ("b", PATH + COLD + FIRST / 2, 100, 1, 9.0)
    requests = requests_of(*rows)
    replay(requests, models("a", "b"), "serverlessllm", settings={"idle_s": str(idle_s), "patience_s": "inf"})
    first, second = requests
    assert second.first_at - first.ended_at == pytest.approx(idle_s + 0.01 + COLD + FIRST)
