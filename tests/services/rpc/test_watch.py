import asyncio
import contextlib

import grpc
from structlog.testing import capture_logs

from services.rpc.watch import ThrottledFollower, Watched, follow_sparingly, follow_stream
from testing.patience import PATIENCE_S


async def test_watched_follower_gets_the_present_value_first_and_then_the_latest():
    watched = Watched(1)
    follower = watched.follow()
    assert await anext(follower) == 1
    watched.set(2)
    watched.set(3)
    assert await anext(follower) == 3, "what was overtaken is left out"


async def test_watched_change_between_two_reads_is_not_lost():
    watched = Watched(0)
    follower = watched.follow()
    await anext(follower)
    watched.set(1)
    assert await asyncio.wait_for(anext(follower), PATIENCE_S) == 1


def facts(state):
    return state[0]


async def test_throttled_follower_repeats_an_unchanged_state_after_the_longest_interval():
    told = follow_sparingly(Watched(None), lambda: ("same", 1), ThrottledFollower(facts, 0.0), 0.0, 0.01)
    assert [await anext(told), await anext(told)] == [("same", 1)] * 2


async def test_throttled_follower_sends_a_delayed_state_without_a_further_change():
    states, changes = [("a", 1)], Watched(None)
    told = follow_sparingly(changes, lambda: states[-1], ThrottledFollower(facts, 0.2), 0.0, None)
    assert await anext(told) == ("a", 1)
    states.append(("a", 2))
    changes.set(None)
    assert await asyncio.wait_for(anext(told), 20) == ("a", 2)


async def test_throttled_follower_sends_changed_facts_at_once_and_delays_figures():
    states, changes = [("a", 1)], Watched(None)
    told = follow_sparingly(changes, lambda: states[-1], ThrottledFollower(facts, 1000.0), 0.0, None)
    assert await anext(told) == ("a", 1)
    waiting = asyncio.get_running_loop().create_task(anext(told))
    for state in (("a", 2), ("a", 3), ("b", 4)):
        await asyncio.sleep(0)
        states.append(state)
        changes.set(None)
    assert await asyncio.wait_for(waiting, PATIENCE_S) == ("b", 4)


async def test_watched_change_reaches_every_waiter():
    watched = Watched(0)
    waiting = [asyncio.get_running_loop().create_task(watched.changed(0)) for _ in range(3)]
    await asyncio.sleep(0)
    watched.set(1)
    await asyncio.gather(*waiting)


def refusing(*details, code=grpc.StatusCode.FAILED_PRECONDITION):
    """Streams that are refused with these, one after another, and then one that speaks."""
    left = list(details)

    async def open_stream():
        if left:
            raise grpc.aio.AioRpcError(code, None, None, left.pop(0))
        yield "message"

    return open_stream


async def test_followed_stream_that_is_refused_is_retried_and_each_reason_logged_once():
    with capture_logs() as lines:
        async with contextlib.aclosing(follow_stream(refusing("old", "old", "new"), "s", 0.001, 0.001)) as messages:
            assert await anext(messages) == "message"
    assert [(line["stream"], line["why"]) for line in lines if line["log_level"] == "error"] == [
        ("s", "old"),
        ("s", "new"),
    ]


async def test_followed_stream_that_cannot_be_reached_is_logged_once_with_the_reason():
    away = refusing(*["no route"] * 5, code=grpc.StatusCode.UNAVAILABLE)
    with capture_logs() as lines:
        async with contextlib.aclosing(follow_stream(away, "s", 0.001, 0.004)) as messages:
            assert await anext(messages) == "message"
    warned = [line for line in lines if line["log_level"] == "warning"]
    assert [(line["event"], line["stream"], line["detail"]) for line in warned] == [
        ("not reached yet", "s", "no route")
    ]


async def test_followed_stream_that_was_heard_before_yields_none_when_it_is_away():
    away = refusing("gone", code=grpc.StatusCode.UNAVAILABLE)
    async with contextlib.aclosing(follow_stream(away, "s", 0.001, 0.001, heard=True)) as messages:
        assert [await anext(messages), await anext(messages)] == [None, "message"]
