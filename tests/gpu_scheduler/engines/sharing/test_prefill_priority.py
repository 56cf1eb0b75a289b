from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sharing.prefill_priority import PrefillPriority, worth

MOST_S = 0.05


def test_a_decode_step_waits_while_a_neighbour_prefills_and_no_longer():
    steps = PrefillPriority()
    assert not steps.waits(False, 0.0, MOST_S)
    assert steps.waits(True, 0.01, MOST_S)
    assert steps.waits(True, 0.05, MOST_S)
    assert not steps.waits(False, 0.051, MOST_S)


def test_a_moment_without_a_claim_in_which_no_step_was_made_does_not_begin_the_wait_again():
    steps = PrefillPriority()
    claims = [(True, 0.00), (False, 0.03), (True, 0.032), (False, 0.048)]
    assert [steps.waits(*look, MOST_S) for look in claims] == [True, False, True, False]
    assert not steps.waits(True, 0.06, MOST_S)
    steps.stepped()
    assert steps.waits(True, 0.07, MOST_S)


def test_however_long_neighbours_prefill_a_step_is_made_each_time_it_has_waited_for_its_most():
    steps = PrefillPriority()
    waited = []
    for look in range(13):
        waited.append(steps.waits(True, 0.01 * look, MOST_S))
        if not waited[-1]:
            steps.stepped()
    assert waited == [True] * 5 + [False] + [True] * 5 + [False, True]


def test_who_has_waited_enough_need_not_wait_again_before_its_step():
    steps = PrefillPriority()
    assert steps.waits(True, 0.0, MOST_S)
    assert [steps.waits(True, at, MOST_S) for at in (0.05, 0.06, 0.2)] == [False] * 3


def test_without_a_time_to_wait_it_never_does():
    assert not PrefillPriority().waits(True, 1.0, 0.0)


def test_nobody_waits_who_decodes_for_too_many_requests_for_each_prompt():
    assert [worth(prompts, 32, 16) for prompts in (0, 1, 2, 3)] == [False, False, True, True]
    assert not worth(1, 17, 16) and worth(1, 16, 16)


def test_without_a_bound_everybody_waits_for_any_prompt_and_nobody_for_none():
    assert worth(1, 10_000, 0) and not worth(0, 1, 0)


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.floats(0.0, 0.2)), max_size=50))
def test_nobody_waits_longer_than_the_most_after_the_first_claim_since_the_last_step(looks):
    steps, now, first = PrefillPriority(), 0.0, None
    for claimed, made, later_s in looks:
        now += later_s
        first = now if first is None and claimed else first
        if steps.waits(claimed, now, MOST_S):
            assert claimed and now - first < MOST_S
        elif made:
            steps.stepped()
            first = None
