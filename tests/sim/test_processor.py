import pytest

from sim.clock import Clock
from sim.processor import Processor, Task

LONG_S = 10.0


def task(name, processor, clock, ended):
    """It says when it ended, and rests."""

    def done():
        ended[name] = clock.now
        processor.rest(one)

    one = Task(done)
    return one


def test_one_task_has_all_of_it_and_two_get_equal_slices_of_what_sharing_leaves():
    clock = Clock()
    processor, ended = Processor(clock, sharing=0.8), {}

    processor.work(task("a", processor, clock, ended), 3.0)
    clock.at(1.0, processor.work, task("b", processor, clock, ended), 0.4)
    clock.run()
    # b has 0.4 of each second from 1 to 2, and so has a; then a has 1.6 s left.
    assert ended == {"b": pytest.approx(2.0), "a": pytest.approx(3.6)}


def test_who_needs_less_than_a_slice_gets_that_and_the_others_share_what_is_left_of_it():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}

    processor.work(task("idles", processor, clock, ended), 2.0, devices=0.2)
    for name in ("a", "b"):
        processor.work(task(name, processor, clock, ended), 0.4)
    clock.run()
    # 0.4 each of what 0.2 is missing from; who leaves the devices idle is as fast as alone.
    assert ended == {"a": pytest.approx(1.0), "b": pytest.approx(1.0), "idles": pytest.approx(2.0)}


def test_who_needs_more_than_a_slice_is_slower_by_that():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}

    for name in ("a", "b"):
        processor.work(task(name, processor, clock, ended), 1.0, devices=0.8)
    clock.run()
    assert ended == {"a": pytest.approx(1.6), "b": pytest.approx(1.6)}


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


def test_what_goes_first_has_all_of_it_and_the_others_go_on_where_they_stood():
    clock = Clock()
    processor, ended = Processor(clock, sharing=0.8), {}

    decodes, first, second = (task(name, processor, clock, ended) for name in ("decodes", "first", "second"))
    processor.work(decodes, 2.0, decodes=1)
    clock.at(1.0, lambda: processor.work(first, 0.4, first=1, first_s=LONG_S))
    clock.at(1.2, lambda: processor.work(second, 0.1, first=1, first_s=LONG_S))
    clock.run()
    # Two that go first share: 0.1 s of each take 0.25 s; then the first one has 0.1 s left.
    assert ended == {"second": pytest.approx(1.45), "first": pytest.approx(1.55), "decodes": pytest.approx(2.55)}


def test_decodes_of_too_many_requests_for_each_prompt_that_goes_first_share_with_it():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0, precedence_batch=16), {}

    few, many, prefills = (task(name, processor, clock, ended) for name in ("few", "many", "prefills"))
    processor.work(few, 0.5, decodes=32)
    processor.work(many, 0.5, decodes=33)
    clock.at(0.5, lambda: processor.work(prefills, 0.2, first=2, first_s=LONG_S))
    clock.run()
    # Each decoded 0.25 s; then the prompts and the many have half each, and when the prompts are through, the few.
    assert ended == {"prefills": pytest.approx(0.9), "many": pytest.approx(1.0), "few": pytest.approx(1.2)}


def test_a_task_of_no_length_that_stands_still_ends_when_it_may_go_on():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), []
    one, other = Task(lambda: (ended.append(clock.now), processor.rest(one))), Task(lambda: processor.rest(other))
    processor.work(other, 1.0, first=1, first_s=LONG_S)
    processor.work(one, 0.0, decodes=1)
    clock.run()
    assert ended == [pytest.approx(1.0)]


def test_a_step_whose_host_takes_longer_leaves_the_rest_of_the_devices_time_to_others():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    prefills, decodes = (task(name, processor, clock, ended) for name in ("prefills", "decodes"))
    processor.work(prefills, 0.5, host_s=2.0)
    processor.work(decodes, 1.5)
    clock.run()
    # Half each until 1.0, then the decodes have all of it; the prefill's host is through at 2.0.
    assert ended == {"decodes": pytest.approx(2.0), "prefills": pytest.approx(2.0)}


def test_what_goes_first_does_so_until_its_host_is_through():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    prefills, decodes = (task(name, processor, clock, ended) for name in ("prefills", "decodes"))
    processor.work(decodes, 1.0, decodes=1)
    processor.work(prefills, 0.5, first=1, first_s=LONG_S, host_s=2.0)
    clock.run()
    assert ended == {"prefills": pytest.approx(2.0), "decodes": pytest.approx(3.0)}


def test_what_goes_first_shares_once_it_has_done_so_for_as_long_as_it_may():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    prefills, decodes = (task(name, processor, clock, ended) for name in ("prefills", "decodes"))
    processor.work(decodes, 2.0, decodes=1)
    processor.work(prefills, 1.0, first=1, first_s=0.4)
    clock.run()
    assert ended == {"prefills": pytest.approx(1.6), "decodes": pytest.approx(3.0)}


def test_a_prefill_stands_still_for_nobody():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    long, short = (task(name, processor, clock, ended) for name in ("long", "short"))
    processor.work(long, 1.0, first=1, first_s=0.4)
    clock.at(0.5, lambda: processor.work(short, 0.1, first=1, first_s=LONG_S))
    clock.run()
    assert ended == {"short": pytest.approx(0.7), "long": pytest.approx(1.1)}


def test_who_waits_hears_of_it_once_when_nothing_goes_first_any_more():
    clock = Clock()
    processor, heard = Processor(clock, sharing=1.0, precedence_batch=16), []
    prefills = Task(lambda: processor.rest(prefills))

    def few():
        heard.append(("few", clock.now))

    def many():
        heard.append(("many", clock.now))

    def gone():
        heard.append(("gone", clock.now))

    processor.work(prefills, 1.0, first=2, first_s=LONG_S)
    for then, decodes in ((few, 16), (many, 32), (gone, 1)):
        assert processor.stands_still(decodes)
        processor.wait(decodes, then)
    processor.wait_no_more(gone)
    clock.run()
    assert sorted(heard) == [("few", pytest.approx(1.0)), ("many", pytest.approx(1.0))]
