import pytest

from sim.clock import Clock
from sim.processor import Processor, Task


def test_one_task_has_all_of_it_and_two_get_equal_slices_of_what_sharing_leaves():
    clock = Clock()
    processor, ended = Processor(clock, sharing=0.8), {}

    def task(name):
        def done():
            ended[name] = clock.now
            processor.rest(one)

        one = Task(done)
        return one

    processor.work(task("a"), 3.0)
    clock.at(1.0, processor.work, task("b"), 0.4)
    clock.run()
    # b has 0.4 of each second from 1 to 2, and so has a; then a has 1.6 s left.
    assert ended == {"b": pytest.approx(2.0), "a": pytest.approx(3.6)}


def test_what_is_left_of_a_task_is_told_in_the_middle_of_it():
    clock = Clock()
    processor = Processor(clock, sharing=1.0)
    one, other = Task(lambda: None), Task(lambda: None)
    processor.work(one, 2.0)
    processor.work(other, 2.0)
    clock.at(1.0, lambda: None)
    clock.run(until=1.0)
    assert processor.left(one) == pytest.approx(1.5)
    processor.rest(other)
    clock.run(until=2.0)
    assert processor.left(one) == pytest.approx(0.5) and processor.busy == 1
