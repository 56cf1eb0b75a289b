"""Places fail, models wake, placement goes away; requests go on, and what cannot go on says why."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import types
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs
from structlog.typing import EventDict

from gateway.routing import relay
from gateway.routing.relay import RelayPatience
from gateway.routing.routes import Route, RoutePlace, RouteTable
from protos import common_pb2, placement_pb2
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import FakeGroup, Output, Running
from tests.gateway.openai.test_completions import events
from tests.gateway.test_app import refusal

TEXT = "one two three four five, the quick brown fox jumps over the lazy dog"


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"park_time_out_s": 20.0, "replay_limit": 2}


def text_of(told: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for event in told for c in event["choices"])


def fails_after(world: World, count: int, error: str = "its engine died") -> fakes.Script:
    """Says `count` tokens of TEXT from where it was taken up, then gives the request back."""

    async def script(running: Running) -> None:
        resumed = running.submit.resumed_tokens
        for token in world.ids(TEXT)[resumed : resumed + count]:
            running.tokens([token])
        running.finish(common_pb2.FAILED, error)

    return script


def paused(lines: list[EventDict]) -> EventDict:
    """The one line about a pause."""
    (line,) = (line for line in lines if line["event"] == "stream paused")
    return line


async def both_places(world: World) -> None:
    await world.publish(world.route(*map(fakes.place, world.groups)))


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_dies_only_pauses_the_answer(world: World, stream: bool) -> None:
    said = world.say(TEXT)
    world.groups[0].script = fails_after(world, 5)
    await both_places(world)
    more = {"stream_options": {"include_usage": True}} if stream else {}
    response = await world.chat(stream=stream, seed=3, max_tokens=40, min_tokens=8, **more)
    if stream:
        told = events(response)
        text, usage = text_of(told), told[-1]["usage"]
    else:
        text, usage = response.json()["choices"][0]["message"]["content"], response.json()["usage"]
    first, second = world.groups[0].requests[0].submit, world.groups[1].requests[0].submit
    assert text == TEXT
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(first.token_ids), len(said))
    assert list(second.token_ids) == [*first.token_ids, *said[:5]]
    assert (second.resumed_tokens, second.sampling.max_new_tokens, second.sampling.min_new_tokens) == (5, 35, 8)
    assert second.sampling.seed == 3


async def test_group_that_dies_only_pauses_all_its_streams(world: World) -> None:
    world.say(TEXT)
    reached = asyncio.Event()

    async def hangs(running: Running) -> None:
        running.tokens(world.ids(TEXT)[:3])
        if len(world.groups[0].requests) == 10:
            reached.set()

    world.groups[0].script = hangs
    open_streams = [asyncio.get_running_loop().create_task(world.chat(stream=True)) for _ in range(10)]
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    await both_places(world)
    await world.groups[0].die()
    for task in open_streams:
        assert text_of(events(await task)) == TEXT
    assert all(request.submit.resumed_tokens in (0, 3) for request in world.groups[1].requests)


async def test_group_that_comes_back_continues_its_requests(world: World) -> None:
    """One group, its process killed and started anew, while placement is away as well."""
    reached = asyncio.Event()

    async def hangs(running: Running) -> None:
        running.tokens(world.ids(TEXT)[:3])
        reached.set()

    world.groups[0].script = hangs
    task = asyncio.get_running_loop().create_task(world.chat(stream=True))
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    await world.placement.die()
    await world.groups[0].die()
    again = FakeGroup(world.groups[0].address.removeprefix("unix:"), Output(world.ids(TEXT)))
    await again.start()
    assert text_of(events(await task)) == TEXT
    assert again.requests[0].submit.resumed_tokens == 3
    await again.die()


async def test_stop_strings_and_logprobs_continue_across_a_failover(world: World) -> None:
    ids = world.ids(TEXT)

    def scored(count: int, end: bool) -> fakes.Script:
        async def script(running: Running) -> None:
            resumed = running.submit.resumed_tokens
            for position in range(resumed, min(resumed + count, len(ids))):
                running.tokens([ids[position]], logprobs=[common_pb2.TokenLogprob(logprob=-position)])
            running.finish(common_pb2.STOP if end else common_pb2.FAILED)

        return script

    world.groups[0].script, world.groups[1].script = scored(4, False), scored(100, True)
    await both_places(world)
    seam = len(world_text(world, ids[:4]))
    stop = TEXT[seam - 2 : seam + 3]
    choice = (await world.chat(stop=[stop], logprobs=True)).json()["choices"][0]
    assert choice["message"]["content"] == TEXT[: TEXT.index(stop)]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-float(position) for position in range(len(content))]


def world_text(world: World, ids: list[int]) -> str:
    from tests.gateway.tokenizers import tiny

    return str(tiny().decode(ids))


async def test_tokens_in_the_message_of_a_failure_count(world: World) -> None:
    ids = world.say(TEXT)

    async def gives_back(running: Running) -> None:
        running.finish(common_pb2.FAILED, "handed back", ids=ids[:4])

    world.groups[0].script = gives_back
    await both_places(world)
    with capture_logs() as lines:
        answer = (await world.chat()).json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    submitted = world.groups[1].requests[0].submit
    assert submitted.resumed_tokens == 4
    line = paused(lines)
    assert submitted.request_id.startswith(line["request_id"] + "/")
    assert (line["model"], line["reason"]) == (submitted.model, "handed back")
    assert (line["emitted"], line["outcome"], line["log_level"]) == (4, "resumed", "info") and line["ms"] >= 0


async def test_a_place_that_dies_after_the_last_token_ends_the_answer(world: World) -> None:
    world.groups[0].script = fails_after(world, 3)
    await both_places(world)
    with capture_logs() as lines:
        answer = (await world.chat(max_tokens=3)).json()
    assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
    assert not world.groups[1].requests
    assert (paused(lines)["emitted"], paused(lines)["outcome"]) == (3, "resumed")


async def test_relay_pause_that_only_the_end_follows_is_told_as_resumed(world: World) -> None:
    async def ends(running: Running) -> None:
        running.finish(common_pb2.STOP)

    world.groups[0].script, world.groups[1].script = fails_after(world, 3), ends
    await both_places(world)
    with capture_logs() as lines:
        await world.chat()
    assert (paused(lines)["emitted"], paused(lines)["outcome"]) == (3, "resumed")


async def test_relay_pause_that_its_client_does_not_wait_out_is_told(world: World) -> None:
    again = asyncio.Event()

    async def stands_still(running: Running) -> None:
        again.set()
        await running.cancelled.wait()

    world.groups[0].script, world.groups[1].script = fails_after(world, 3), stands_still
    await both_places(world)
    with capture_logs() as lines:
        client = tasks.spawn(world.chat(stream=True), "client")
        await asyncio.wait_for(again.wait(), PATIENCE_S)
        await tasks.cancel(client)
        await asyncio.wait_for((await world.groups[1].arrived(1)).cancelled.wait(), PATIENCE_S)
    assert (paused(lines)["emitted"], paused(lines)["outcome"]) == (3, "cancelled")


async def test_relay_chunks_of_an_abandoned_attempt_are_ignored(world: World) -> None:
    """The same group takes it up again; chunks under the first attempt's name come in between."""
    ids = world.ids(TEXT)
    attempts: list[Running] = []

    async def script(running: Running) -> None:
        attempts.append(running)
        if len(attempts) == 1:
            running.tokens(ids[:2])
            running.finish(common_pb2.FAILED, "its engine died")
        else:
            attempts[0].tokens(ids[:7])
            await Output(ids)(running)
            attempts[0].finish(common_pb2.STOP)

    world.groups[0].script = script

    async def here(_: Any) -> placement_pb2.Place:
        return fakes.place(world.groups[0])

    world.placement.activate = here
    assert (await world.chat()).json()["choices"][0]["message"]["content"] == TEXT
    assert attempts[0].submit.request_id != attempts[1].submit.request_id


@pytest.mark.parametrize(("asked", "times"), [({}, 3), ({"regex": "[a-z]+"}, 2)])
async def test_request_that_repeatedly_kills_its_engine_is_given_up(
    world: World, asked: dict[str, str], times: int
) -> None:
    for group in world.groups:
        group.script = fails_after(world, 0)
    await both_places(world)

    async def here(_: Any) -> placement_pb2.Place:
        return fakes.place(world.groups[0])

    world.placement.activate = here
    error = refusal(await world.chat(**asked), 503)
    assert "its engine died" in str(error["message"])
    assert sum(len(group.requests) for group in world.groups) == times


async def test_failures_with_tokens_in_between_do_not_give_up_a_request(world: World) -> None:
    for group in world.groups:
        group.script = fails_after(world, 4)
    await both_places(world)

    async def here(_: Any) -> placement_pb2.Place:
        return fakes.place(world.groups[0])

    world.placement.activate = here
    count = len(world.ids(TEXT))
    answer = (await world.chat(max_tokens=count)).json()
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["usage"]["completion_tokens"] == count


async def test_relay_model_without_a_place_is_activated_once_for_all_requests(world: World) -> None:
    world.say(TEXT)
    await world.publish(world.route())
    asked = asyncio.Event()
    chosen = asyncio.Event()

    async def choose(_: Any) -> placement_pb2.Place:
        asked.set()
        await chosen.wait()
        return fakes.place(world.groups[1], common_pb2.WAKING)

    world.placement.activate = choose
    waiting = [asyncio.get_running_loop().create_task(world.chat()) for _ in range(5)]
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    while "prism_gateway_in_flight_requests 5.0" not in (await world.http.get("/metrics")).text:
        await asyncio.sleep(0)
    chosen.set()
    for task in waiting:
        assert (await task).json()["choices"][0]["message"]["content"] == TEXT
    assert [request.model for request in world.placement.activations] == [MODEL]


async def test_a_route_with_a_place_costs_no_call_to_placement(world: World) -> None:
    world.say(TEXT)
    await world.placement.die()
    while (await world.http.get("/health")).json()["placement"] != "away":
        await asyncio.sleep(0.005)
    assert (await world.chat()).json()["choices"][0]["message"]["content"] == TEXT
    assert world.groups[0].streams == 1


async def test_relay_request_refused_by_a_group_kv_address_another(world: World) -> None:
    world.say(TEXT)
    world.groups[0].script = fails_after(world, 0, "not here")

    async def there(_: Any) -> placement_pb2.Place:
        return fakes.place(world.groups[1])

    world.placement.activate = there
    assert (await world.chat()).json()["choices"][0]["message"]["content"] == TEXT
    assert len(world.placement.activations) == 1


@pytest.mark.parametrize("asked", [{}, {"regex": "[a-z ]*"}])
@pytest.mark.parametrize("settings", [{"replay_limit": 2}])
async def test_request_whose_model_leaves_again_and_again_is_answered(world: World, asked: dict[str, Any]) -> None:
    answer = fakes.Output(world.ids(TEXT))
    left = 6

    async def leaves(running: Running) -> None:
        nonlocal left
        left -= 1
        await (fails_after(world, 0, "handed back") if left >= 0 else answer)(running)

    for group in world.groups:
        group.script = leaves
    await both_places(world)
    assert (await world.chat(**asked)).json()["choices"][0]["message"]["content"] == TEXT
    assert left == -1


async def test_active_places_come_before_waking_ones(world: World) -> None:
    world.say(TEXT)
    waking, active = fakes.place(world.groups[0], common_pb2.WAKING), fakes.place(world.groups[1])
    await world.publish(world.route(waking, active, residency=common_pb2.ACTIVE))
    await world.chat()
    assert (len(world.groups[0].requests), len(world.groups[1].requests)) == (0, 1)


async def test_relay_of_two_active_places_takes_the_one_with_the_prefix_unless_it_is_far_busier(world: World) -> None:
    world.say(TEXT)
    await both_places(world)
    first, second = world.groups
    shared = {"messages": [{"role": "user", "content": "one and the same beginning " * 12}]}
    hanging, reached = 0, asyncio.Condition()

    async def hangs(running: Running) -> None:
        nonlocal hanging
        async with reached:
            hanging += 1
            reached.notify_all()

    async def hang(group: FakeGroup, count: int, **body: Any) -> list[asyncio.Task[Any]]:
        speaks, group.script = group.script, hangs
        tasks_ = [tasks.spawn(world.chat(**body), "a request that hangs") for _ in range(count)]
        async with reached, asyncio.timeout(PATIENCE_S):
            await reached.wait_for(lambda: hanging == count)
        group.script = speaks
        return tasks_

    (busy,) = await hang(first, 1)
    await world.chat(**shared)
    await tasks.cancel(busy)
    await world.chat(**shared)
    assert (len(first.requests), len(second.requests)) == (1, 2), "to the one that has it, though the other was idle"
    hanging = 0
    stuck = await hang(second, 5, **shared)
    await world.chat(**shared)
    assert (len(first.requests), len(second.requests)) == (2, 7), "five more are too many"
    await tasks.cancel(*stuck)


async def hold_on(running: Running) -> None:
    await running.cancelled.wait()


async def test_relay_takes_no_group_for_a_prefix_that_the_model_had_before_it_left_there(world: World) -> None:
    world.say(TEXT)
    first, second = world.groups
    shared = {"messages": [{"role": "user", "content": "one and the same beginning " * 12}]}
    await both_places(world)
    speaks, first.script = first.script, hold_on
    waits = tasks.spawn(world.chat(), "a request that waits")
    await asyncio.wait_for(first.arrived(1), PATIENCE_S)
    await world.chat(**shared)
    first.script = speaks
    await tasks.cancel(waits)
    await world.chat(**shared)
    assert (len(first.requests), len(second.requests)) == (1, 2), "to the one that has it"
    await world.publish(world.route(fakes.place(first)))
    await both_places(world)
    await world.chat(**shared)
    assert (len(first.requests), len(second.requests)) == (2, 2), "neither has it"


async def followed(world: World, count: int = 1) -> None:
    """Returns when both groups were asked for their outlooks, which were told right then, so often."""
    async with asyncio.timeout(PATIENCE_S):
        while any(len(group.followed) < count for group in world.groups):
            await asyncio.sleep(0)
    await world.chat()  # behind the outlook on the same stream


async def test_relay_sends_no_request_where_it_would_be_late_though_its_prefix_is_there(world: World) -> None:
    world.say(TEXT)
    first, second = world.groups
    first.outlook.models.add(model=MODEL, queue_s=100.0, tokens_per_s=1000.0)
    second.outlook.models.add(model=MODEL, queue_s=0.0, tokens_per_s=1000.0)
    shared = {"messages": [{"role": "user", "content": "one and the same beginning " * 12}]}
    await both_places(world)
    await followed(world)
    before = len(second.requests)
    for _ in range(3):
        await world.chat(**shared, headers={"x-slo-ttft-ms": "5000"})
    assert (len(first.requests), len(second.requests)) == (0, before + 3)
    await world.publish(world.route(fakes.place(second)))
    async with asyncio.timeout(PATIENCE_S):
        while second.followed[-1]:
            await asyncio.sleep(0)
    assert first.followed == [True], "its link is closed"


async def test_relay_kv_address_the_group_that_was_given_the_kv(world: World) -> None:
    said = world.say(TEXT)
    leaving, given = world.groups

    leaves_now = asyncio.Event()

    async def leaves(running: Running) -> None:
        running.tokens(said[:3])
        await leaves_now.wait()
        running.tokens([], finish=common_pb2.FAILED, error="handed back", kv_address=given.address)

    idle = FakeGroup(given.address.removeprefix("unix:") + ".idle", given.script)
    await idle.start()
    leaving.script = leaves
    await world.publish(world.route(fakes.place(leaving)))
    answer = tasks.spawn(world.chat(), "a chat")
    await asyncio.wait_for(leaving.arrived(1), PATIENCE_S)
    await world.publish(world.route(*(fakes.place(each) for each in (leaving, idle, given))))
    leaves_now.set()
    assert (await answer).json()["choices"][0]["message"]["content"] == TEXT
    assert (len(idle.requests), len(given.requests)) == (0, 1)
    await idle.die()


async def test_relay_unreachable_time_starts_anew_after_a_group_took_the_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody at first, then a group to which there was no connection yet, which has it for longer than that bound."""
    world.say(TEXT)

    async def leaves_late(running: Running) -> None:
        running.tokens(world.ids(TEXT)[:3])
        monkeypatch.setattr(relay, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + 18.0))
        running.finish(common_pb2.FAILED, "not here")

    world.groups[1].script = leaves_late

    async def first_one_then_the_other(_: Any) -> placement_pb2.Place:
        return fakes.place(world.groups[0 if world.groups[1].requests else 1])

    world.placement.activate = first_one_then_the_other
    world.placement.refusal = (grpc.StatusCode.UNAVAILABLE, "no group is reachable")
    await world.publish(world.route())
    answer = asyncio.get_running_loop().create_task(world.chat())
    await world.placement.activated(1)
    world.placement.refusal = None
    assert (await answer).json()["choices"][0]["message"]["content"] == TEXT


async def test_a_model_in_error_is_a_503_with_its_reason(world: World) -> None:
    await world.publish(world.route(residency=common_pb2.ERROR, error="tensor x is missing"))
    error = refusal(await world.chat(), 503)
    assert (error["code"], "tensor x is missing" in str(error["message"])) == ("model_error", True)
    await world.publish(world.route())
    world.placement.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "the checkpoint is truncated")
    error = refusal(await world.chat(stream=True), 503)
    assert (error["code"], "truncated" in str(error["message"])) == ("model_error", True)


async def test_relay_model_with_a_passing_error_is_a_503_with_retry_after(world: World) -> None:
    away = {"residency": common_pb2.ERROR, "error": "its folder does not exist"}
    route = world.route(**away)
    route.retry_s = 7.5
    await world.publish(route)
    for response in (await world.chat(), await world.chat(stream=True), await world.complete()):
        assert refusal(response, 503)["code"] == "model_error" and response.headers["retry-after"] == "8"
    listed = (await world.http.get(f"/v1/models/{MODEL}")).json()
    assert listed["error"] == "its folder does not exist"


async def test_error_messages_name_no_folder_or_socket_of_the_server(world: World) -> None:
    said, told = (
        "the loader at unix:/run/prism/loader.sock: /srv/m/a.json: EIO",
        "the loader at loader.sock: a.json: EIO",
    )
    world.placement.refusal = (grpc.StatusCode.FAILED_PRECONDITION, said)
    await world.publish(world.route())
    error = refusal(await world.chat(), 503)
    assert (error["code"], error["message"]) == ("model_error", told)
    world.groups[0].script = world.groups[1].script = fails_after(world, 0, said)
    await both_places(world)
    error = refusal(await world.chat(), 503)
    assert error["code"] == "unavailable" and str(error["message"]).endswith(told)


async def test_a_model_that_placement_forgot_is_a_404(world: World) -> None:
    await world.publish(world.route())
    world.placement.refusal = (grpc.StatusCode.NOT_FOUND, "no such model")
    assert refusal(await world.chat(), 404)


def test_pauses_between_attempts_grow_and_are_bounded() -> None:
    patience = RelayPatience(park_s=1, total_s=0, strikes=1, first_pause_s=0.05, longest_pause_s=1.0)
    assert [patience.pause_s(tries) for tries in range(9)] == [0, 0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


class TestNotParkedForLong:
    """With a bound for waiting that is short enough to run out."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"park_time_out_s": 2.0}

    @pytest.mark.parametrize("settings", [{"park_time_out_s": 10.0}])  # enough for placement's answer
    async def test_model_that_fits_nowhere_is_a_503_with_the_sizes(self, world: World) -> None:
        await world.publish(world.route())
        world.placement.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "needs 5, free 3")
        response = await world.chat()
        error = refusal(response, 503)
        assert (error["code"], "needs 5, free 3" in str(error["message"])) == ("model_not_ready", True)
        assert int(response.headers["retry-after"]) > 0

    async def test_a_model_that_wakes_too_slowly_is_a_503_to_retry(self, world: World) -> None:
        async def never(running: Running) -> None:
            await running.cancelled.wait()

        world.groups[0].script = never
        await world.publish(world.route(fakes.place(world.groups[0], common_pb2.WAKING)))
        response = await world.chat(stream=True)
        assert refusal(response, 503)["code"] == "model_not_ready"
        assert "retry-after" in response.headers
        await asyncio.wait_for((await world.groups[0].arrived(1)).cancelled.wait(), PATIENCE_S)

    async def test_relay_pause_without_another_place_in_time_is_told_as_given_up(self, world: World) -> None:
        world.groups[0].script = fails_after(world, 3)
        await world.publish(world.route(fakes.place(world.groups[0])))
        world.placement.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "needs 5, free 3")
        with capture_logs() as lines:
            assert refusal(await world.chat(), 503)["code"] == "model_not_ready"
        assert (paused(lines)["emitted"], paused(lines)["outcome"]) == (3, "given up")

    async def test_relay_model_whose_group_and_placement_are_away_is_a_503(self, world: World) -> None:
        await world.groups[0].die()
        await world.placement.die()
        assert refusal(await world.chat(), 503)["code"] == "model_not_ready"


class TestImpatient:
    """With a bound for whole requests that is short enough to run out."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"park_time_out_s": 0.3, "request_time_out_s": 2.0}

    async def test_request_to_a_busy_model_times_out_with_a_504(self, world: World) -> None:
        async def never(running: Running) -> None:
            await running.cancelled.wait()

        world.groups[0].script = never
        assert refusal(await world.chat(), 504)["code"] == "time_out"
        submit = world.groups[0].requests[0].submit
        assert 0 < submit.time_out_left_ms <= 2000


class TestNobodyReached:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"park_time_out_s": 60.0, "reach_time_out_s": 0.2}

    async def test_relay_request_without_reachable_groups_fails_before_the_bound_for_waking(self, world: World) -> None:
        await world.publish(world.route())
        world.placement.refusal = (grpc.StatusCode.UNAVAILABLE, "no group is reachable")
        error = refusal(await world.chat(), 503)
        assert error["code"] == "unavailable"
        assert error["message"] == "no group that serves it could be reached within 0.2 s: no group is reachable"

    async def test_unreachable_places_are_tried_no_longer_than_the_bound(self, world: World) -> None:
        world.say(TEXT)
        for group in world.groups:
            await group.die()
        await both_places(world)
        world.placement.refusal = (grpc.StatusCode.UNAVAILABLE, "no group is reachable")
        error = refusal(await world.chat(), 503)
        assert "within 0.2 s: no connection to" in str(error["message"])

    async def test_model_waiting_for_room_is_waited_for_beyond_the_bound_for_reaching_groups(
        self, world: World
    ) -> None:
        world.say(TEXT)
        await world.publish(world.route())
        world.placement.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        answer = asyncio.get_running_loop().create_task(world.chat())
        await world.placement.activated(6)  # the pauses in between are longer than the bound, all in all
        await both_places(world)
        assert (await answer).json()["choices"][0]["message"]["content"] == TEXT


class Clock:
    """The relay's, which a test puts forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + self.ahead_s)
        monkeypatch.setattr(relay, "time", clock)


class TestCompiling:
    """Requests for a model whose kernels are being compiled."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"park_time_out_s": 20.0, "compile_time_out_s": 300.0}

    @pytest.fixture
    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
        """Requests that were sent to a group, and its address."""
        found: list[tuple[Any, str]] = []
        set_timer = relay.Tokens._set_timer

        def noted(self: Any, address: str) -> None:
            found.append((self, address))
            set_timer(self, address)

        monkeypatch.setattr(relay.Tokens, "_set_timer", noted)
        return found

    async def waits(
        self, world: World, sent: list[tuple[Any, str]], *, compiling: bool
    ) -> tuple[asyncio.Task[Any], Running, asyncio.Event]:
        """A request at a group that wakes the model; since then kernels are compiled, or not. The event lets the model
        answer."""
        ready = asyncio.Event()
        said = world.say(TEXT)

        async def script(running: Running) -> None:
            await ready.wait()
            await Output(said)(running)

        world.groups[0].script = script
        place = fakes.place(world.groups[0], common_pb2.WAKING)
        await world.publish(world.route(place))
        answer = asyncio.get_running_loop().create_task(world.chat())
        running = await world.groups[0].arrived(1)
        place.compiling = compiling
        await world.publish(world.route(place))
        while sent[0][0]._relay.routes.compiles(MODEL) != compiling:
            await asyncio.sleep(0.005)
        return answer, running, ready

    async def test_relay_request_waits_longer_for_a_compiling_model_than_for_a_waking_one(
        self, world: World, sent: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer, running, ready = await self.waits(world, sent, compiling=True)
        clock = Clock(monkeypatch)
        tokens, address = sent[0]
        clock.ahead_s = 21.0
        tokens._expired(address)
        assert tokens._fate is None and not running.cancelled.is_set()
        assert len(sent) == 2, "the timer is set again"
        ready.set()
        assert (await answer).json()["choices"][0]["message"]["content"] == TEXT

    async def test_waking_model_without_compilation_is_waited_for_only_the_usual_bound(
        self, world: World, sent: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer, running, _ = await self.waits(world, sent, compiling=False)
        Clock(monkeypatch).ahead_s = 21.0
        sent[0][0]._expired(sent[0][1])
        response = await answer
        assert refusal(response, 503)["code"] == "model_not_ready" and response.headers["retry-after"] == "5"
        await asyncio.wait_for(running.cancelled.wait(), PATIENCE_S)

    @pytest.mark.parametrize(("ahead_s", "bounds"), [(301.0, {}), (601.0, {"compile_time_out_s": 600.0})])
    async def test_relay_request_past_the_compiling_bound_fails_with_reason_and_retry_after(
        self,
        world: World,
        sent: list[tuple[Any, str]],
        monkeypatch: pytest.MonkeyPatch,
        ahead_s: float,
        bounds: dict[str, float],
    ) -> None:
        answer, running, _ = await self.waits(world, sent, compiling=True)
        Clock(monkeypatch).ahead_s = ahead_s
        if bounds:  # the bound of whole requests is as long
            patience = sent[0][0]._relay.patience
            monkeypatch.setattr(sent[0][0]._relay, "patience", dataclasses.replace(patience, compile_s=600.0))
        sent[0][0]._expired(sent[0][1])
        response = await answer
        error = refusal(response, 503)
        assert error["code"] == "model_not_ready" and response.headers["retry-after"] == "30"
        assert "kernels are being compiled, which is done once for this machine" in str(error["message"])
        await asyncio.wait_for(running.cancelled.wait(), PATIENCE_S)

    async def test_compiling_model_is_waited_for_at_most_the_bound_of_whole_requests(
        self, world: World, sent: list[tuple[Any, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer, *_ = await self.waits(world, sent, compiling=True)
        shorter = dataclasses.replace(sent[0][0]._relay.patience, total_s=30.0)
        monkeypatch.setattr(sent[0][0]._relay, "patience", shorter)
        Clock(monkeypatch).ahead_s = 31.0
        sent[0][0]._expired(sent[0][1])
        assert refusal(await answer, 503)["code"] == "model_not_ready"

    async def test_route_table_model_with_an_active_place_is_not_compiling(self, world: World) -> None:
        table = RouteTable()
        compiles = RoutePlace("a", "unix:/a", common_pb2.WAKING, True)
        for places, expected in (
            ((compiles,), True),
            ((compiles, RoutePlace("b", "unix:/b", common_pb2.ACTIVE)), False),
            ((), False),
        ):
            table.set([Route(common_pb2.ModelSpec(name="m"), common_pb2.WAKING, places, "", 0, 0)])
            assert table.compiles("m") is expected
        assert not table.compiles("unknown")


class TestCompilingElsewhere:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"park_time_out_s": 0.2, "compile_time_out_s": 300.0}

    async def test_relay_request_without_a_place_waits_longer_while_kernels_are_compiled(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was sent back, and placement answers after the bound for others is over."""
        world.say(TEXT)
        world.groups[0].script = fails_after(world, 0, "not here")
        asked = 0
        over = asyncio.Event()

        def compiles(self: RouteTable, model: str) -> bool:
            nonlocal asked
            asked += 1
            if asked > 1:
                over.set()
            return asked > 1

        monkeypatch.setattr(RouteTable, "compiles", compiles)

        async def later(_: Any) -> placement_pb2.Place:
            await over.wait()
            return fakes.place(world.groups[1])

        world.placement.activate = later
        assert (await world.chat()).json()["choices"][0]["message"]["content"] == TEXT


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("not here", "the model had left the group that the request was sent to"),
        ("handed back", "the model left its GPUs before the answer was complete"),
        ("not here: no room for it", "no room for it"),
    ],
)
@pytest.mark.parametrize("settings", [{"park_time_out_s": 0.3}])
async def test_relay_that_found_no_place_in_time_says_why_in_a_clients_words(
    world: World, error: str, told: str
) -> None:
    for group in world.groups:
        group.script = fails_after(world, 0, error)
    refused = await world.chat()
    message = refused.json()["error"]["message"]
    assert refused.status_code == 503 and message.endswith(f"could not be brought up within 0.3 s: {told}")
