"""Which group gets a request: seconds that a prefix saves against seconds of queue, and numbers of requests."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.policy.replica_choice import AHEAD, PATIENT_S, GroupOutlook, SentWork, choose

SPEED = 8_000.0
PROMPT = 16_000
"""Tokens of a prompt that takes two seconds where none of it is cached."""


def group(requests: int = 0, queue_s: float = 0.0, cached: int = 0) -> GroupOutlook:
    return GroupOutlook(requests, queue_s, SPEED, cached)


@pytest.mark.parametrize(
    ("queue_s", "left_s", "chosen"),
    [
        (0.0, 4.0, 0),
        (3.4, 4.0, 0),  # 3.4 s of queue and 0.5 s of prefill: on time, and a second and a half of prefill is saved
        (3.6, 4.0, 1),
        (3.6, 2.1, 1),
        (9.0, 1.0, 0),  # late at both; the prefix saves work that others wait for
        (0.9, inf, 0),
        (1.4, inf, 0),  # it saves 1.5 s
        (1.6, inf, 1),
    ],
)
def test_cached_prefix_decides_while_its_group_is_not_late(queue_s: float, left_s: float, chosen: int) -> None:
    assert choose([group(1, queue_s, cached=12_000), group(0)], PROMPT, left_s) == chosen


def test_prompt_without_a_target_waits_for_its_prefix_only_as_long_as_it_is_patient() -> None:
    short, speed_s = 800, 800 / SPEED
    assert choose([group(0, PATIENT_S - speed_s, cached=512), group(0)], short) == 0
    assert choose([group(0, PATIENT_S + speed_s, cached=512), group(0)], short) == 1


def test_cached_prefix_does_not_send_everything_to_the_group_that_has_it() -> None:
    def chosen(ahead: int) -> int:
        return choose([group(5 + ahead, cached=12_000), group(5)], PROMPT, 60.0)

    assert [chosen(AHEAD), chosen(AHEAD + 1)] == [0, 1]


def test_group_where_the_first_token_would_be_late_comes_last_though_it_has_fewest_requests() -> None:
    assert choose([group(1, queue_s=5.0), group(3), group(2)], PROMPT, 4.0) == 2


def test_groups_of_which_nothing_is_known_get_requests_by_their_number() -> None:
    unknown = [GroupOutlook(3), GroupOutlook(1), GroupOutlook(2)]
    assert choose(unknown, PROMPT, 0.1) == choose(unknown, PROMPT) == 1


outlooks = st.lists(
    st.builds(
        GroupOutlook,
        st.integers(0, 40),
        st.floats(0, 30),
        st.sampled_from([500.0, SPEED, inf]),
        st.integers(0, PROMPT),
    ),
    min_size=1,
    max_size=5,
)


@given(outlooks, st.one_of(st.just(inf), st.floats(-5, 30)))
def test_request_is_never_late_where_another_group_would_have_it_on_time(
    groups: list[GroupOutlook], left_s: float
) -> None:
    firsts = [each.first_token_s(PROMPT) for each in groups]
    chosen = firsts[choose(groups, PROMPT, left_s)]
    bound_s = left_s if left_s < inf else PATIENT_S
    assert chosen <= bound_s or min(firsts) > bound_s


@given(outlooks)
def test_request_without_a_target_waits_no_longer_than_it_is_patient_or_has_to(groups: list[GroupOutlook]) -> None:
    firsts = [each.first_token_s(PROMPT) for each in groups]
    assert firsts[choose(groups, PROMPT)] <= max(PATIENT_S, min(firsts))


def test_sent_work_is_worked_off_as_time_passes_and_never_below_nothing() -> None:
    sent = SentWork()
    for second in range(1, 1000):  # a quarter of a second of prefill each second
        sent.add(0.25, float(second))
        assert sent.left_s(float(second)) == 0.25
    sent.add(2.0, 1000.0)
    assert (sent.left_s(1000.0), sent.left_s(1001.5), sent.left_s(1010.0)) == (2.0, 0.5, 0.0)
    assert sent.left_s(999.0) == 2.0, "a second that is earlier takes nothing off"


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0)), max_size=30))
def test_sent_work_is_that_of_a_queue_that_one_server_works_off(steps: list[tuple[float, float]]) -> None:
    sent, now, ends = SentWork(), 0.0, 0.0
    for pause_s, seconds in steps:
        now += pause_s
        sent.add(seconds, now)
        ends = max(ends, now) + seconds
        assert sent.left_s(now) == pytest.approx(ends - now)
