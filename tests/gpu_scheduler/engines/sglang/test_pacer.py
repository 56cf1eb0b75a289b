from math import inf

import pytest

from gpu_scheduler.engines.sglang.pacer import Pacer


@pytest.fixture
def pacer():
    pacer = Pacer()
    pacer.look(100.0)
    return pacer


def test_the_first_step_waits_for_nothing(pacer):
    assert pacer.rest(10.0, 100.0) == 0


def test_the_pause_counts_from_the_end_of_the_last_step_and_is_as_many_times_as_long(pacer):
    pacer.began()
    assert pacer.rest(5.0, 101.0) == inf
    pacer.ended()
    assert pacer.rest(5.0, 101.0) == inf, "nobody has said yet what time it is"
    pacer.look(102.0)
    pacer.look(103.0)
    assert (pacer.rest(5.0, 104.0), pacer.rest(5.0, 112.0), pacer.rest(0.5, 102.5)) == (8.0, 0.0, 0.5)


def test_with_several_steps_on_the_device_it_counts_from_the_last_one_which_began_when_the_other_ended(pacer):
    for _ in range(2):
        pacer.began()
    pacer.ended()
    pacer.look(110.0)
    assert pacer.rest(5.0, 200.0) == inf
    pacer.ended()
    pacer.look(113.0)
    assert pacer.rest(2.0, 114.0) == 5.0


def test_without_a_pause_the_next_step_may_be_formed_while_one_runs(pacer):
    pacer.began()
    assert pacer.rest(0.0, 100.0) == 0
