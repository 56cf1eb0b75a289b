from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.policy.precedence import Precedence

MOST_S = 0.05


def test_a_decode_step_waits_while_a_neighbour_prefills_and_no_longer():
    steps = Precedence()
    assert not steps.waits(False, 0.0, MOST_S)
    assert steps.waits(True, 0.01, MOST_S)
    assert steps.waits(True, 0.05, MOST_S)
    assert not steps.waits(False, 0.051, MOST_S)


def test_however_long_neighbours_prefill_a_step_is_made_each_time_it_has_waited_for_its_most():
    steps = Precedence()
    waited = []
    for look in range(13):
        waited.append(steps.waits(True, 0.01 * look, MOST_S))
        if not waited[-1]:
            steps.stepped()
    assert waited == [True] * 5 + [False] + [True] * 5 + [False, True]


def test_who_has_waited_enough_need_not_wait_again_before_its_step():
    steps = Precedence()
    assert steps.waits(True, 0.0, MOST_S)
    assert [steps.waits(True, at, MOST_S) for at in (0.05, 0.06, 0.2)] == [False] * 3


def test_without_a_time_to_wait_it_never_does():
    assert not Precedence().waits(True, 1.0, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 0.2)), max_size=50))
def test_no_two_steps_are_further_apart_than_the_most_and_a_look(looks):
    steps, now, last = Precedence(), 0.0, 0.0
    for claimed, later_s in looks:
        now += later_s
        if steps.waits(claimed, now, MOST_S):
            assert claimed and now - last < MOST_S + 2 * 0.2
        else:
            steps.stepped()
            last = now
