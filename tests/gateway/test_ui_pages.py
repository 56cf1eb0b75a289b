"""The page's paths, at a real gateway before a fake placement."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import gateway.ui
from protos import placement_pb2
from testing.patience import PATIENCE_S
from tests.gateway.conftest import MODEL, World

STATIC = Path(gateway.ui.__file__).parent / "static"
PATHS = ["/ui", "/ui/", "/ui/state.json", "/ui/events", *(f"/ui/{file.name}" for file in sorted(STATIC.iterdir()))]


@pytest.fixture
def waits() -> dict[str, float]:
    """Who does not answer is gone, not slow."""
    return {"look_s": PATIENCE_S}


async def states(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The documents of the stream."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


async def test_ui_page_is_served_with_and_without_a_slash(world: World) -> None:
    response = await world.http.get("/ui", follow_redirects=True)
    assert response.status_code == 200 and response.url.path == "/ui/"
    assert (await world.http.get("/", follow_redirects=True)).url.path == "/ui/", "where a browser begins"
    assert response.headers["content-type"].startswith("text/html") and "<title>Prism</title>" in response.text
    assert (await world.http.get("/ui/nothing.js")).status_code == 404
    assert (await world.http.get("/ui/..%2Fconfig.py")).status_code == 404


async def test_ui_responses_have_a_content_security_policy_for_own_files_only(world: World) -> None:
    for path in PATHS:
        async with world.http.stream("GET", path) as response:
            policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("file", sorted(STATIC.iterdir()), ids=lambda file: file.name)
def test_ui_files_load_nothing_from_elsewhere_and_make_no_markup_of_text(file: Path) -> None:
    text = file.read_text()
    addresses = set(re.findall(r"(?:[a-z]+:)?//[\w.-]+\.\w+[\w./-]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, which nobody asks for
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|style=\"|onclick=", text)


async def test_ui_file_that_did_not_change_is_a_304(world: World) -> None:
    first = await world.http.get("/ui/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = await world.http.get("/ui/main.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_ui_state_has_the_cluster_of_placement_and_the_counts_of_the_gateway(world: World) -> None:
    world.placement.cluster.groups.add(group="g", reachable=True, capacity_bytes=10, free_bytes=10)
    world.placement.decisions = [placement_pb2.Decision(model=MODEL, action="activate", group="g")]
    world.say("one two")
    for _ in range(2):
        answer = await world.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "hello"}, headers={"x-slo-ttft-ms": "60000"}
        )
        assert answer.status_code == 200
    state = (await world.http.get("/ui/state.json")).json()
    assert state["placement"]["away"] is None
    assert [group["group"] for group in state["groups"]] == ["g"]
    assert [(each["model"], each["action"]) for each in state["decisions"]] == [(MODEL, "activate")]
    assert [(each["model"], each["state"]) for each in state["models"]] == [(MODEL, "active")]
    assert sum(state["attainment"][MODEL]["ttft"].values()) >= 2


async def test_ui_state_of_a_group_that_does_not_answer_has_no_queue(world: World) -> None:
    group = world.placement.cluster.groups.add(group="g", reachable=True, address=f"unix:{world.sockets}/nobody.sock")
    group.models.add(model=MODEL, waiting=3)
    (shown,) = (await world.http.get("/ui/state.json")).json()["groups"]
    assert (shown["models"][0]["waiting"], shown["models"][0]["late"]) == (3, None)


async def test_ui_stream_has_decisions_only_when_there_are_new_ones(world: World) -> None:
    decision = placement_pb2.Decision(model=MODEL, action="activate", group="g", outcome="under way")
    world.placement.decisions = [decision]
    async with world.http.stream("GET", "/ui/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = states(response)
        assert [each["outcome"] for each in (await anext(stream))["decisions"]] == ["under way"]
        assert "decisions" not in await anext(stream)
        decision.outcome = "done in 1.00 s"
        while "decisions" not in (state := await anext(stream)):
            pass
        assert [each["outcome"] for each in state["decisions"]] == ["done in 1.00 s"]


@pytest.mark.parametrize("encoding", ["gzip", "identity"])
async def test_ui_stream_event_is_whole_as_soon_as_it_is_sent(world: World, encoding: str) -> None:
    async with world.http.stream("GET", "/ui/events", headers={"accept-encoding": encoding}) as response:
        assert response.headers.get("content-encoding", "identity") == encoding
        async for state in states(response):
            assert state["placement"]["away"] is None
            break


async def test_ui_stream_says_that_placement_is_away_and_continues_when_it_is_back(world: World) -> None:
    world.placement.cluster.groups.add(group="g", reachable=True)
    async with world.http.stream("GET", "/ui/events") as response:
        stream = states(response)
        assert (await anext(stream))["placement"]["away"] is None
        await world.placement.die()
        while not (state := await anext(stream))["placement"]["away"]:
            pass
        assert [group["group"] for group in state["groups"]] == ["g"] and state["placement"]["age_s"] > 0
        del world.placement.cluster.groups[:]
        await world.placement.start()
        while (state := await anext(stream))["placement"]["away"]:
            pass
        assert state["groups"] == []


@pytest.mark.parametrize("path", PATHS)
async def test_ui_pages_requested_by_a_foreign_host_name_are_denied(world: World, path: str) -> None:
    response = await world.http.get(path, headers={"host": "example.org"})
    assert response.status_code == 403 and response.json()["error"]["code"] == "denied"
    assert world.placement.looks == 0


@pytest.mark.parametrize("settings", [{"ui": False}])
async def test_ui_pages_switched_off_are_404(world: World) -> None:
    for path in PATHS:
        assert (await world.http.get(path)).status_code == 404


@pytest.mark.parametrize("settings", [{"ui": True}])
async def test_ui_pages_switched_on_for_all_are_shown_to_any_host(world: World) -> None:
    assert (await world.http.get("/ui/state.json", headers={"host": "example.org"})).status_code == 200
