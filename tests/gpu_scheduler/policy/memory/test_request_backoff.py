"""Memory is requested once at a time for each model, and not as fast as balloond can answer."""

from math import inf

from gpu_scheduler.policy.memory.request_backoff import AGAIN_S, MemoryRequestBackoff
from gpu_scheduler.policy.queue.decisions import NeedMemory

NEED = NeedMemory("a", 100, "r", 1.0)


def answered(granted):
    limit = MemoryRequestBackoff()
    assert limit.take(NEED, 0.0)
    limit.answered("a", "r", granted, 0.0)
    return limit


def test_a_model_has_one_memory_request_under_way_and_others_have_theirs():
    limit = MemoryRequestBackoff()
    assert limit.take(NEED, 0.0)
    assert not limit.take(NEED, 0.0) and not limit.take(NeedMemory("a", 7, "s", inf), 9.0)
    assert limit.take(NeedMemory("b", 7, "t", inf), 0.0)


def test_memory_that_was_granted_and_not_enough_is_requested_again_after_a_pause():
    limit = answered(granted=True)
    assert not limit.take(NEED, 0.4 * AGAIN_S)
    assert limit.next_deadline() == AGAIN_S
    limit.expire(AGAIN_S)
    assert limit.next_deadline() == inf
    assert limit.take(NEED, AGAIN_S)


def test_memory_request_for_another_request_of_the_model_does_not_wait_for_the_pause():
    assert answered(granted=True).take(NeedMemory("a", 7, "s", inf), 0.0)


def test_a_request_that_started_in_its_room_wakes_no_plan():
    assert answered(granted=True).next_deadline() == inf


def test_memory_request_that_found_no_room_is_made_again_with_the_next_plan():
    limit = answered(granted=False)
    assert limit.next_deadline() == inf
    assert limit.take(NEED, 0.0)
