from math import inf

from gpu_scheduler.engines.sglang.pacer import Pacer


def test_the_first_step_waits_for_nothing():
    assert Pacer().rest(10.0, 100.0) == 0


def test_the_pause_counts_from_the_end_of_the_last_step():
    pacer = Pacer()
    pacer.began()
    assert pacer.rest(10.0, 100.0) == inf
    pacer.ended()
    assert pacer.rest(10.0, 101.0) == inf, "nobody has said yet what time it is"
    pacer.look(102.0)
    pacer.look(103.0)
    assert (pacer.rest(10.0, 104.0), pacer.rest(10.0, 112.0)) == (8.0, 0.0)


def test_with_several_steps_on_the_device_it_counts_from_the_last_one():
    pacer = Pacer()
    for _ in range(2):
        pacer.began()
    pacer.ended()
    pacer.look(100.0)
    assert pacer.rest(10.0, 200.0) == inf


def test_without_a_pause_the_next_step_may_be_formed_while_one_runs():
    pacer = Pacer()
    pacer.began()
    assert pacer.rest(0.0, 100.0) == 0
