from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.pace import FREE, Decoding, Pace, PaceRules, Prefilling, pace, stretch

SECONDS = st.floats(1e-4, 1.0)
NEIGHBOURS = st.lists(st.builds(Decoding, SECONDS, SECONDS, st.floats(1 / 64, 1.0)), max_size=4)
PREFILLS = st.builds(Prefilling, st.floats(100.0, 1e6), st.floats(0.0, 0.05))
RULES = PaceRules()
H200 = Prefilling(35_000.0, 0.005)


def test_without_a_decoding_neighbour_there_is_no_bound_and_no_pause():
    assert pace(H200, []) == FREE


def test_a_step_that_may_take_twice_as_long_meets_a_chunk_of_its_slack_and_then_a_pause_of_a_step():
    assert pace(H200, [Decoding(0.008, 0.016)]) == Pace(int(RULES.margin * 0.008 * 35_000), 0.008)


def test_a_target_that_slices_alone_keep_sets_no_bound():
    assert pace(H200, [Decoding(0.008, 0.008 * (2 + 1 / RULES.margin))]) == FREE


def test_a_step_that_nobody_knows_sets_no_bound():
    assert pace(H200, [Decoding(0.0, 0.016)]) == FREE


def test_a_target_out_of_reach_buys_the_smallest_steps_and_no_more():
    assert pace(H200, [Decoding(0.020, 0.010)]) == Pace(RULES.least_tokens, 0.020)


def test_engines_that_prefill_at_once_share_what_a_step_may_meet():
    neighbours = [Decoding(0.020, 0.040)]
    assert pace(H200, neighbours, at_once=2).chunk_tokens == pace(H200, neighbours).chunk_tokens // 2


@given(PREFILLS, NEIGHBOURS)
def test_no_step_meets_more_than_it_bears_except_by_the_least_tokens(prefilling, neighbours):
    answer = pace(prefilling, neighbours)
    bounded = [one for one in neighbours if one.bears(RULES.margin) < one.step_s]
    if answer == FREE:
        assert not bounded
        return
    assert answer.chunk_tokens >= RULES.least_tokens
    assert answer.pause_s == max(one.step_s for one in bounded)
    if answer.chunk_tokens > RULES.least_tokens:
        met = answer.chunk_tokens / prefilling.tokens_per_s
        assert all(one.step_s + met <= one.target_s for one in bounded)


@given(PREFILLS, NEIGHBOURS, SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_a_looser_target_never_makes_a_prefill_slower(prefilling, neighbours, step_s, target_s, looser):
    tight = pace(prefilling, [*neighbours, Decoding(step_s, target_s)])
    loose = pace(prefilling, [*neighbours, Decoding(step_s, target_s + looser)])
    assert loose.pause_s <= tight.pause_s
    assert loose == FREE or tight.chunk_tokens <= loose.chunk_tokens != 0


@given(PREFILLS, NEIGHBOURS, st.builds(Decoding, SECONDS, SECONDS))
def test_another_neighbour_never_makes_a_prefill_faster(prefilling, neighbours, one_more):
    without, beside = pace(prefilling, neighbours), pace(prefilling, [*neighbours, one_more])
    assert beside.pause_s >= without.pause_s
    assert without == FREE or 0 < beside.chunk_tokens <= without.chunk_tokens


@given(PREFILLS, NEIGHBOURS, st.integers(1, 200_000))
def test_every_prompt_is_done_after_a_stated_number_of_steps(prefilling, neighbours, tokens):
    answer = pace(prefilling, neighbours)
    steps, left = 0, tokens
    while left > 0:
        left -= answer.chunk_tokens or left
        steps += 1
    assert steps <= ceil(tokens / RULES.least_tokens)


@given(PREFILLS, NEIGHBOURS)
def test_a_pace_never_counts_as_faster_than_none(prefilling, neighbours):
    answer = pace(prefilling, neighbours)
    assert stretch(answer, prefilling) >= 1.0
    assert answer != FREE or stretch(answer, prefilling) == 1.0


def test_the_stretch_is_what_small_steps_and_pauses_add():
    # 224 tokens in 6.4 ms of work, then 8 ms of pause; whole chunks would take 6.4 ms for as many.
    assert stretch(Pace(224, 0.008), H200) == pytest.approx((6.4 + 8) / 6.4)
    # So few tokens are read as slowly as one.
    assert stretch(Pace(70, 0.0), H200) == pytest.approx(0.005 / 0.002)
