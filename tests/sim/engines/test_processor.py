import pytest

from sim.clock import Clock
from sim.engines.processor import Processor, Task

LONG_S = 10.0


def task(name, processor, clock, ended):
    """It says when it ended, and rests."""

    def done():
        ended[name] = clock.now
        processor.rest(one)

    one = Task(done)
    return one


def test_task_alone_has_the_whole_processor_and_two_get_equal_slices_less_sharing():
    clock = Clock()
    processor, ended = Processor(clock, sharing=0.8), {}

    processor.work(task("a", processor, clock, ended), 3.0)
    clock.at(1.0, processor.work, task("b", processor, clock, ended), 0.4)
    clock.run()
    # b has 0.4 of each second from 1 to 2, and so has a; then a has 1.6 s left.
    assert ended == {"b": pytest.approx(2.0), "a": pytest.approx(3.6)}


def test_task_that_needs_less_than_a_slice_leaves_the_rest_to_others():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}

    processor.work(task("idles", processor, clock, ended), 2.0, devices=0.2)
    for name in ("a", "b"):
        processor.work(task(name, processor, clock, ended), 0.4)
    clock.run()
    # 0.4 each of what 0.2 is missing from; who leaves the devices idle is as fast as alone.
    assert ended == {"a": pytest.approx(1.0), "b": pytest.approx(1.0), "idles": pytest.approx(2.0)}


def test_task_that_needs_more_than_a_slice_is_slowed_in_proportion():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}

    for name in ("a", "b"):
        processor.work(task(name, processor, clock, ended), 1.0, devices=0.8)
    clock.run()
    assert ended == {"a": pytest.approx(1.6), "b": pytest.approx(1.6)}


def test_task_time_left_is_known_while_it_runs():
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


class Decoder:
    """One that was told."""

    def __init__(self, clock):
        self._clock = clock
        self.claims = []

    def claimed(self):
        self.claims.append(self._clock.now)


def test_decoding_engine_is_notified_of_a_prefill_with_priority_and_shares_until_it_stops():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    decoder = processor.decoding["decodes"] = Decoder(clock)
    decodes, first, other = (task(name, processor, clock, ended) for name in ("decodes", "first", "other"))
    processor.work(decodes, 0.3, decodes=True)
    clock.at(0.1, lambda: processor.work(first, 0.4, first=1, first_s=LONG_S))
    clock.at(0.2, lambda: processor.work(other, 0.1))  # for which nobody stands still
    clock.run()
    assert decoder.claims == [pytest.approx(0.1)]
    # 0.1 alone, 0.05 of two, then 0.15 of three, which is the other's 0.1 and more; the first has the rest.
    assert ended == {"other": pytest.approx(0.5), "decodes": pytest.approx(0.6), "first": pytest.approx(0.8)}


def test_engines_that_all_decode_lose_less_by_sharing_than_beside_a_prefill():
    clock = Clock()
    processor, ended = Processor(clock, sharing=0.5, decode_sharing=0.8), {}
    for name in ("a", "b"):
        processor.work(task(name, processor, clock, ended), 0.4, decodes=True)
    clock.at(0.5, lambda: processor.work(task("prefills", processor, clock, ended), 0.1))
    clock.run()
    # 0.2 of each in half a second; then a sixth of each second until the prefill is through, and 0.4 again.
    assert ended == {"prefills": pytest.approx(1.1), "a": pytest.approx(1.35), "b": pytest.approx(1.35)}


def test_a_step_whose_host_takes_longer_leaves_the_rest_of_the_devices_time_to_others():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    prefills, decodes = (task(name, processor, clock, ended) for name in ("prefills", "decodes"))
    processor.work(prefills, 0.5, host_s=2.0)
    processor.work(decodes, 1.5)
    clock.run()
    # Half each until 1.0, then the decodes have all of it; the prefill's host is through at 2.0.
    assert ended == {"decodes": pytest.approx(2.0), "prefills": pytest.approx(2.0)}


def test_prefill_priority_lasts_until_its_host_is_through_and_at_most_its_limit():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    prefills, long = (task(name, processor, clock, ended) for name in ("prefills", "long"))
    processor.work(prefills, 0.5, first=1, first_s=LONG_S, host_s=2.0)
    clock.run(1.9)
    assert processor.stands_still(1)
    clock.run()
    assert ended == {"prefills": pytest.approx(2.0)} and not processor.stands_still(1)
    processor.work(long, 1.0, first=1, first_s=0.4)
    clock.run(2.3)
    assert processor.stands_still(1)
    clock.run(2.5)
    assert not processor.stands_still(1)


def test_decodes_have_the_devices_in_the_gaps_of_a_prefill_without_priority():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    decodes = Task(lambda: None)
    processor.work(decodes, 100.0, decodes=True)
    processor.work(task("prefill", processor, clock, ended), 0.5, gaps_s=3.0)
    clock.run(until=10.0)
    # Every other slice is its own for a second, and 3 s go by in gaps; the decodes have had all the rest.
    assert ended == {"prefill": pytest.approx(4.0)}
    assert processor.left(decodes) == pytest.approx(100.0 - (10.0 - 0.5))


def test_gaps_of_a_prefill_cost_less_beside_decodes_that_leave_the_devices_idle():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    processor.work(Task(lambda: None), 100.0, decodes=True, devices=0.5)
    processor.work(task("prefill", processor, clock, ended), 0.5, host_s=0.6, gaps_s=3.0)
    clock.run(until=10.0)
    assert ended == {"prefill": pytest.approx(1.0 + 0.6)}, "for as long as its host is at it they are busy"


def test_gaps_of_a_prefill_cost_nothing_beside_another_prefill():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    for name in ("a", "b"):
        processor.work(task(name, processor, clock, ended), 0.5, gaps_s=3.0)
    clock.run()
    assert ended == {"a": pytest.approx(1.0), "b": pytest.approx(1.0)}


def test_prefill_does_not_stand_still_for_another_prefill_with_priority():
    clock = Clock()
    processor, ended = Processor(clock, sharing=1.0), {}
    long, short = (task(name, processor, clock, ended) for name in ("long", "short"))
    processor.work(long, 1.0, first=1, first_s=0.4)
    clock.at(0.5, lambda: processor.work(short, 0.1, first=1, first_s=LONG_S))
    clock.run()
    assert ended == {"short": pytest.approx(0.7), "long": pytest.approx(1.1)}


def test_waiting_decoder_is_notified_once_when_prefill_priority_ends():
    clock = Clock()
    processor, heard = Processor(clock, sharing=1.0, prefill_priority_batch=16), []
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
