from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing.throttle import (
    BESIDE,
    FREE,
    Decoding,
    Prefilling,
    PrefillThrottle,
    ThrottleRules,
    throttle_beside,
)

SECONDS = st.floats(1e-4, 1.0)
LOSSES = st.floats(0.0, 0.9)
NEIGHBOURS = st.lists(st.builds(Decoding, SECONDS, SECONDS, LOSSES), max_size=4)
PREFILLS = st.builds(Prefilling, st.floats(100.0, 1e6), st.floats(0.0, 0.05))
RULES = ThrottleRules()
H200 = Prefilling(35_000.0, 0.005)
MEASURED = 1 - 5.2 / 12.66
"""What the 8B model lost beside another one's prefill."""


def throttle(
    prefilling: Prefilling, neighbours: list[Decoding], at_once: int = 1, rules: ThrottleRules = RULES
) -> PrefillThrottle:
    return throttle_beside(prefilling, [(one.tolerates(rules), one.step_s) for one in neighbours], at_once, rules)


def mean_step_s(throttles: list[PrefillThrottle], one: Decoding) -> float:
    """Beside engines whose steps never meet each other, which costs most."""
    return one.step_s / (1 - one.loss * sum(each.share for each in throttles))


def test_throttle_without_a_decoding_neighbour_is_free():
    assert throttle(H200, []) == FREE


def test_throttle_for_a_target_of_twice_the_step_leaves_prefill_three_quarters_of_the_time():
    answer = throttle(H200, [Decoding(0.0052, 0.0104, MEASURED)])
    assert answer.share == pytest.approx(0.755, abs=0.001)
    assert answer.pause_ratio == pytest.approx((1 - 1.8 * 5.2 / 12.66) / 0.8), "P >= T (1 - R / kappa) / (R - 1)"
    assert answer.chunk_tokens == pytest.approx(16 * 0.0052 * 0.755 / 2 * 35_000, abs=2)


def test_throttle_for_a_target_that_is_kept_beside_endless_prefill_is_free():
    assert throttle(H200, [Decoding(0.008, 0.008 * 2.4 / RULES.margin + 1e-9)]) == FREE


def test_throttle_beside_a_step_of_unknown_time_is_free():
    assert throttle(H200, [Decoding(0.0, 0.016)]) == FREE


@pytest.mark.parametrize("target_s", [1e-9, 0.010, 0.020])
def test_throttle_for_a_target_out_of_reach_leaves_prefill_its_least_share(target_s):
    assert throttle(H200, [Decoding(0.020, target_s)]).share == pytest.approx(RULES.least_share)


def test_engines_that_prefill_at_once_share_the_time():
    neighbours = [Decoding(0.020, 0.040)]
    assert throttle(H200, neighbours, at_once=2).share == pytest.approx(throttle(H200, neighbours).share / 2)
    loose = [Decoding(0.020, 0.055)]
    assert throttle(H200, loose) == FREE != throttle(H200, loose, at_once=2)


def test_throttle_steps_are_short_beside_quick_decodes_but_mostly_longer_than_weight_reads():
    quick, slow, any_length = Decoding(0.001, 0.002), Decoding(0.016, 0.032), ThrottleRules(least_step_s=0.0)
    assert throttle(H200, [quick], rules=any_length).chunk_tokens == 3 * 0.005 * 35_000
    assert throttle(H200, [slow]).chunk_tokens > throttle(H200, [slow, quick]).chunk_tokens
    assert throttle(Prefilling(2000.0), [quick]).chunk_tokens == RULES.least_tokens


def test_throttle_step_is_no_shorter_than_the_host_needs_to_launch_it():
    small = Prefilling(230_000.0, 0.0013)
    assert throttle(small, [Decoding(0.001, 0.002)]).chunk_tokens == RULES.least_step_s * 230_000


@given(PREFILLS, NEIGHBOURS, st.integers(1, 4))
def test_the_mean_step_is_within_every_target_that_can_be_met_and_prefill_has_its_least_share(
    prefilling, neighbours, at_once
):
    answer = throttle(prefilling, neighbours, at_once)
    assert answer.share >= RULES.least_share / at_once * (1 - 1e-9)
    for one in neighbours:
        if one.loss > 0 and answer.share * at_once > RULES.least_share * (1 + 1e-9):
            assert mean_step_s([answer] * at_once, one) <= RULES.margin * one.target_s * (1 + 1e-9)


@given(PREFILLS, st.builds(Decoding, SECONDS, SECONDS, st.floats(0.05, 0.9)), st.floats(0.3, 1.0))
def test_mean_step_over_simulated_cycles_is_what_the_formula_says(prefilling, one, work_s):
    """Whatever a prefill step takes: steps of the neighbour are counted through three cycles of it."""
    answer = throttle(prefilling, [one])
    steps = 0.0
    for _ in range(3):
        steps += work_s * (1 - one.loss) / one.step_s + answer.pause_ratio * work_s / one.step_s
    mean_s = 3 * work_s * (1 + answer.pause_ratio) / steps
    assert mean_s == pytest.approx(mean_step_s([answer], one))
    if one.step_s <= RULES.margin * one.target_s * (1 - one.loss * RULES.least_share):
        assert mean_s <= RULES.margin * one.target_s * (1 + 1e-9), "it can be reached, so it is"


@given(PREFILLS, st.builds(Decoding, SECONDS, SECONDS, st.floats(0.05, 0.9)))
def test_throttle_holds_prefill_back_no_more_than_the_target_requires(prefilling, one):
    answer = throttle(prefilling, [one])
    if answer != FREE and answer.share > RULES.least_share * (1 + 1e-9):
        assert mean_step_s([answer], one) == pytest.approx(RULES.margin * one.target_s)


@given(PREFILLS, NEIGHBOURS, st.integers(1, 4))
def test_throttle_cycle_is_short_or_its_step_the_shortest_allowed(prefilling, neighbours, at_once):
    answer = throttle(prefilling, neighbours, at_once)
    if answer == FREE:
        return
    bound = [one for one in neighbours if one.tolerates(RULES) < at_once]
    alone_s = answer.chunk_tokens / prefilling.tokens_per_s
    cycle_s = BESIDE * alone_s * answer.slowdown
    assert (
        cycle_s <= RULES.cycle_steps * min(one.step_s for one in bound) * (1 + 1e-9)
        or alone_s <= max(RULES.fixed_costs * prefilling.least_s, RULES.least_step_s) * (1 + 1e-9)
        or answer.chunk_tokens == RULES.least_tokens
    )


@given(PREFILLS, NEIGHBOURS, SECONDS, SECONDS, LOSSES, st.floats(0.0, 1.0))
def test_a_looser_target_never_makes_a_prefill_slower(prefilling, neighbours, step_s, target_s, loss, looser):
    tight = throttle(prefilling, [*neighbours, Decoding(step_s, target_s, loss)])
    loose = throttle(prefilling, [*neighbours, Decoding(step_s, target_s + looser, loss)])
    assert loose.pause_ratio <= tight.pause_ratio
    assert loose == FREE or tight.chunk_tokens <= loose.chunk_tokens != 0


@given(PREFILLS, NEIGHBOURS, SECONDS, SECONDS, LOSSES, LOSSES)
def test_a_neighbour_that_loses_more_never_makes_a_prefill_faster(prefilling, neighbours, step_s, target_s, one, other):
    less, more = sorted([one, other])
    lenient = throttle(prefilling, [*neighbours, Decoding(step_s, target_s, less)])
    strict = throttle(prefilling, [*neighbours, Decoding(step_s, target_s, more)])
    assert strict.pause_ratio >= lenient.pause_ratio


@given(PREFILLS, NEIGHBOURS, st.builds(Decoding, SECONDS, SECONDS))
def test_neighbour_that_is_added_never_makes_a_prefill_faster(prefilling, neighbours, one_more):
    without, beside = throttle(prefilling, neighbours), throttle(prefilling, [*neighbours, one_more])
    assert beside.pause_ratio >= without.pause_ratio
    assert without == FREE or 0 < beside.chunk_tokens <= without.chunk_tokens


@given(PREFILLS, NEIGHBOURS, st.integers(1, 200_000))
def test_throttled_prompt_is_done_after_a_bounded_number_of_steps(prefilling, neighbours, tokens):
    answer = throttle(prefilling, neighbours)
    steps, left = 0, tokens
    while left > 0:
        left -= answer.chunk_tokens or left
        steps += 1
    assert steps <= ceil(tokens / RULES.least_tokens)


@given(PREFILLS, NEIGHBOURS)
def test_throttle_never_counts_as_faster_than_none(prefilling, neighbours):
    answer = throttle(prefilling, neighbours)
    assert answer.slowdown >= 1.0
    assert answer != FREE or answer.slowdown == 1.0
    assert answer.share * answer.slowdown == pytest.approx(1.0)
