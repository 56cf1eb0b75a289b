import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.lead import Lead
from gpu_scheduler.policy.pace import FREE, Pace, PaceRules

RULES = PaceRules()
SECONDS = st.floats(1e-3, 1.0)


class Engine:
    """Of which a request decodes for ever, and others want to be prefilled."""

    def __init__(self, step_s, allowed_s, lead_steps=1):
        self.lead, self.step_s, self.pace = Lead(), step_s, Pace(step_s=allowed_s, lead_s=lead_steps * allowed_s)
        self.now = self.prefilled_s = 0.0
        self.steps = 0
        self.lead.alone()
        self.prefill(0.01)

    def prefill(self, took_s):
        self.now += took_s
        self.prefilled_s += took_s
        self.lead.prefilled(self.now, took_s, self.pace)

    def decode(self):
        began = self.now
        self.now += self.step_s
        self.steps += 1
        self.lead.decoded(began, self.now, self.pace)

    def until_free(self):
        """As many decode steps as come before a prefill step."""
        while self.lead.hold_s(self.now) > 0:
            self.decode()


def test_nothing_is_held_where_there_is_no_bound_and_where_nothing_decodes():
    lead = Lead()
    lead.prefilled(1.0, 1.0, FREE)
    lead.decoded(1.0, 2.0, FREE)
    assert lead.hold_s(9.0) == 0
    lead = Lead()
    lead.alone()
    assert lead.hold_s(9.0) == 0


def test_prefills_go_first_as_long_as_what_decodes_has_its_step_before_it():
    engine = Engine(0.007, 0.09)
    for _ in range(8):
        assert engine.lead.hold_s(engine.now) == 0
        engine.prefill(0.011)
    assert engine.lead.hold_s(engine.now) == 0, "88 ms"
    engine.prefill(0.011)
    assert engine.lead.hold_s(engine.now) == pytest.approx(0.011 / 3)
    engine.decode()
    assert engine.lead.hold_s(engine.now) == 0, "one step made it good"


def test_a_bound_that_goes_away_holds_nothing_and_what_comes_after_it_begins_anew():
    engine = Engine(0.007, 0.02)
    engine.prefill(1.0)
    assert engine.lead.hold_s(engine.now) > 0
    engine.pace = FREE
    engine.decode()
    assert engine.lead.hold_s(engine.now) == 0
    engine.pace = Pace(step_s=0.02, lead_s=0.02)
    engine.prefill(0.010)
    assert engine.lead.hold_s(engine.now) == 0 == engine.lead.hold_s(engine.now + 0.019)


def test_what_decodes_after_a_time_of_nothing_owes_nothing():
    engine = Engine(0.007, 0.02)
    engine.now += 100.0
    engine.lead.alone()
    engine.prefill(1.0)
    assert engine.lead.hold_s(engine.now) == 0


@pytest.mark.parametrize("lead_steps", [1, 5])
def test_a_fast_time_is_saved_up_to_the_bound_and_not_for_those_who_were_not_there(lead_steps):
    engine = Engine(0.001, 0.010, lead_steps)
    for _ in range(1000):
        engine.decode()
    assert engine.lead.ahead_s(engine.now) == pytest.approx(lead_steps * 0.010 - 0.001)


def test_a_run_of_steps_counts_as_its_steps_one_by_one():
    one, other = Engine(0.004, 0.010), Engine(0.004, 0.010)
    for engine in (one, other):
        engine.prefill(0.2)
    for _ in range(7):
        one.decode()
    other.lead.decoded(other.now, other.now + 7 * 0.004, other.pace, 7)
    assert one.lead.ahead_s(9.0) == pytest.approx(other.lead.ahead_s(9.0))


def test_a_step_may_count_when_it_is_given_to_the_device():
    lead, pace = Lead(), Pace(step_s=0.010, lead_s=0.010)
    lead.prefilled(0.0, 0.3, pace)
    lead.decoded(0.015, 0.015, pace)
    assert lead.ahead_s(0.015) == pytest.approx(0.005)
    lead.decoded(0.016, 0.016, pace)
    assert lead.ahead_s(0.016) == pytest.approx(0.010), "of two steps that begin at once the device has one before it"


@given(
    st.floats(1e-3, 0.03),
    st.floats(1 / (1 - RULES.own_least_share), 30.0),
    st.integers(1, 20),
    st.lists(st.floats(1e-3, 0.5), min_size=1, max_size=40),
)
def test_the_mean_step_comes_to_rest_at_the_bound_where_the_least_share_allows_it(step_s, times, lead_steps, took_s):
    """From the first token on: never further behind than by its lead and one prefill step."""
    engine = Engine(step_s, times * step_s, lead_steps)
    first = engine.now
    for seconds in took_s:
        engine.until_free()
        engine.prefill(seconds)
    assert engine.now - first <= engine.pace.step_s * engine.steps + engine.pace.lead_s + max(took_s) + 1e-9


@given(SECONDS, SECONDS, st.lists(SECONDS, min_size=1, max_size=40))
def test_prefills_have_their_least_share_but_for_the_step_under_way_whatever_the_bound_is(step_s, allowed_s, took_s):
    engine = Engine(step_s, allowed_s)
    for seconds in took_s:
        engine.until_free()
        engine.prefill(seconds)
    decoded_s = engine.steps * step_s
    assert decoded_s <= engine.prefilled_s * (1 / RULES.own_least_share - 1) + (1 + len(took_s)) * step_s + 1e-9


@given(SECONDS, SECONDS, SECONDS)
def test_who_stood_still_for_longer_than_a_step_may_take_is_next(step_s, allowed_s, took_s):
    engine = Engine(step_s, allowed_s)
    engine.prefill(allowed_s + took_s)
    assert engine.lead.hold_s(engine.now) > 0


def test_what_a_long_overload_cost_is_not_made_good_at_the_expense_of_later_first_tokens():
    engine = Engine(0.02, 0.01)
    for _ in range(500):
        engine.until_free()
        engine.prefill(0.1)
    engine.step_s = 0.002
    engine.until_free()
    assert engine.lead.ahead_s(engine.now) >= 0, "one hold made good what is owed"


@given(SECONDS, SECONDS, st.integers(1, 20), st.lists(SECONDS, min_size=1, max_size=40), st.floats(0.0, 9.0))
def test_nobody_is_owed_more_than_the_lead_and_the_prefill_step_before(step_s, allowed_s, lead_steps, took_s, pause_s):
    engine = Engine(step_s, allowed_s, lead_steps)
    for seconds in took_s:
        engine.prefill(seconds)
        most_s = engine.pace.lead_s + seconds
        assert engine.lead.ahead_s(engine.now + pause_s) >= -most_s
        engine.until_free()
        assert engine.lead.ahead_s(engine.now) >= -most_s
