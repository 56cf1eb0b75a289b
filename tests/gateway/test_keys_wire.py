"""Keys as clients meet them: real HTTP, real gRPC."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from gateway.access import keys
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.rpc import rpc
from services.telemetry.log import PLAIN
from testing.patience import PATIENCE_S
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.test_app import refusal

OTHER = "org/other"


def entry(name: str, **more: Any) -> str:
    """Whose key is the name."""
    values = {"name": name, "hash": keys.digest(name), **more}
    return "[[key]]\n" + "".join(
        f"{field} = {str(v).lower() if isinstance(v, bool) else repr(v)}\n" for field, v in values.items()
    )


USERS = entry("ann", models=[MODEL]) + entry("ops", admin=True) + entry("stranger", models=["else/*"])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(USERS)
    return path


@pytest.fixture
def settings(file: Path) -> dict[str, Any]:
    return {"keys_file": str(file)}


@pytest.fixture
def key() -> str:
    return "ops"


@pytest.fixture
async def world(world: World) -> World:
    world.openai = world.openai.with_options(api_key="ann")
    return world


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def write(file: Path, text: str) -> None:
    """As one should: whole, at once."""
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


async def take(world: World, file: Path, text: str) -> None:
    """Has the gateway look at the new file."""
    write(file, text)
    for followed in world.service._followed:
        followed.refresh()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/metrics"),
        ("GET", "/ui/"),
        ("GET", "/ui/state.json"),
        ("GET", "/nothing"),
    ],
)
async def test_request_without_a_key_is_a_401_on_every_path_but_health(world: World, method: str, path: str) -> None:
    for headers in (
        {},
        bearer("nobody"),
        {"authorization": "ann"},
        {"authorization": "Basic !"},
        {"authorization": b"Basic \xe9"},
        {"authorization": "Bearer"},
    ):
        error = refusal(await world.http.request(method, world.url + path, headers=headers, content=b"{}"), 401)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "nobody" not in str(error)
    assert (await world.http.get("/health")).status_code == 200


async def test_openai_client_works_with_a_key_and_raises_its_own_errors_without_one(world: World) -> None:
    world.say("one two")
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = await world.openai.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == "one two"
    with pytest.raises(openai.AuthenticationError):
        await world.openai.with_options(api_key="nobody").models.list()
    with pytest.raises(openai.NotFoundError) as unknown:
        await world.openai.with_options(api_key="stranger").chat.completions.create(model=MODEL, messages=messages)
    assert unknown.value.code == "model_not_found"


async def test_model_out_of_scope_of_a_key_looks_like_an_unknown_one(world: World) -> None:
    await world.publish(world.route(fakes.place(world.groups[0])), world.route(name=OTHER), key="ops")
    listed = await world.http.get("/v1/models", headers=bearer("ann"))
    assert [card["id"] for card in listed.json()["data"]] == [MODEL]
    said = []
    for name in (OTHER, "org/none"):
        asks = [
            world.http.get(f"/v1/models/{name}", headers=bearer("ann")),
            world.http.post("/v1/completions", json={"model": name, "prompt": "a"}, headers=bearer("ann")),
            world.http.post("/tokenize", json={"model": name, "prompt": "a"}, headers=bearer("ann")),
            world.http.post("/detokenize", json={"model": name, "tokens": [1]}, headers=bearer("ann")),
        ]
        said.append([str(refusal(await ask, 404)).replace(name, "NAME") for ask in asks])
    assert said[0] == said[1]


async def test_alias_of_a_model_is_its_name_on_every_path_and_opens_no_other(world: World, file: Path) -> None:
    """`ann` may use the model, `default` one of its aliases alone, and the pattern of `globs` matches only an alias."""
    only = entry("default", models=["default"]) + entry("globs", models=["gpt-*"])
    await take(world, file, USERS + only)
    aliased = world.route(fakes.place(world.groups[0]), aliases=["default", "gpt-4o"])
    await world.publish(aliased, key="ops")
    world.say("one two")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/tokenize", {"prompt": "hello"}),
        ("/detokenize", {"tokens": [1]}),
    ]

    async def statuses(key: str, name: str) -> set[int]:
        asks = [world.http.post(path, json=body | {"model": name}, headers=bearer(key)) for path, body in bodies]
        asks.append(world.http.get(f"/v1/models/{name}", headers=bearer(key)))
        answers = [await ask for ask in asks]
        told = {body["model"] for answer in answers if "model" in (body := answer.json())}
        assert told <= {MODEL}, "answers name the model itself"
        return {answer.status_code for answer in answers}

    for name in (MODEL, "default", "gpt-4o"):
        assert await statuses("ann", name) == {200}
        assert await statuses("globs", name) == await statuses("stranger", name) == {404}
        assert await statuses("default", name) == ({200} if name == "default" else {404})
    assert {one.submit.model for one in world.groups[0].requests} == {MODEL}

    async def listed(key: str) -> list[tuple[str, str, list[str]]]:
        cards = (await world.http.get("/v1/models", headers=bearer(key))).json()["data"]
        return [(card["id"], card["root"], card["aliases"]) for card in cards]

    client = world.openai.with_options(api_key="default")
    assert [card.id async for card in client.models.list()] == ["default"]
    assert (
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": "a"}])
    ).model == MODEL
    both = ["default", "gpt-4o"]
    assert await listed("ann") == [(name, MODEL, both) for name in (MODEL, *both)]
    assert await listed("default") == [("default", MODEL, ["default"])]
    assert await listed("globs") == []
    counted = (await world.http.get("/metrics", headers=bearer("ops"))).text
    assert 'key="default",kind="prompt",model="org/tiny"' in counted
    assert 'model="default"' not in counted and "gpt-4o" not in counted

    async with rpc.channel(world.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        metadata = [("authorization", "Bearer default")]
        models = (await stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=metadata)).models
        assert [(model.name, list(model.aliases)) for model in models] == [(MODEL, ["default"])]
        asked = gateway_pb2.GenerateRequest(model="default", text="hello")
        assert "".join([part.text async for part in stub.Generate(asked, metadata=metadata)]) == "one two"


async def test_metrics_and_ui_need_an_admin_key(world: World) -> None:
    for path in ("/metrics", "/metrics%0A", "/ui", "/ui%0A", "/ui/", "/ui/state.json", "/ui/app.js"):
        assert refusal(await world.http.get(path, headers=bearer("ann")), 403)["code"] == "denied"
    assert (await world.http.get("/metrics", headers=bearer("ops"))).status_code == 200
    assert (await world.http.get("/ui/", headers=bearer("ops") | {"host": "example.org"})).status_code == 200


async def test_admin_key_as_a_basic_password_is_accepted_only_for_the_ui(world: World) -> None:
    basic = {"authorization": "Basic " + base64.b64encode(b"me:ops").decode()}
    asked = await world.http.get("/ui/")
    assert asked.headers["www-authenticate"].startswith("Basic ")
    assert (await world.http.get("/ui/", headers=basic)).status_code == 200
    other = await world.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}, headers=basic)
    assert (other.status_code, other.headers["www-authenticate"].split()[0]) == (401, "Bearer")


async def test_grpc_calls_need_a_key_in_scope(world: World) -> None:
    world.say("one two")
    asked = gateway_pb2.GenerateRequest(model=MODEL, text="hello", sampling=common_pb2.Sampling(max_new_tokens=2))

    async def code(name: str | None, request: gateway_pb2.GenerateRequest = asked) -> grpc.StatusCode:
        metadata = None if name is None else [("authorization", f"Bearer {name}")]
        call = gateway_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError:
            pass
        return await call.code()

    async with rpc.channel(world.grpc_address) as channel:
        assert await code("ann") == grpc.StatusCode.OK
        assert await code(None) == grpc.StatusCode.UNAUTHENTICATED
        assert await code("nobody") == grpc.StatusCode.UNAUTHENTICATED
        assert await code("stranger") == grpc.StatusCode.NOT_FOUND
        stub = gateway_pb2_grpc.InferenceStub(channel)
        names = []
        for name in ("ann", "stranger"):
            listed = await stub.ListModels(
                gateway_pb2.ListModelsRequest(), metadata=[("authorization", f"Bearer {name}")]
            )
            names.append([model.name for model in listed.models])
        assert names == [[MODEL], []]
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        # It is refused before it asks anything: what it was just sending would fail otherwise, and be why.
        reflected = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflected.read()
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def until_told(world: World) -> asyncio.Event:
    """Answers say a token and end when this is set."""
    stop = asyncio.Event()

    async def slow(running: Running) -> None:
        running.tokens(world.ids("one"))
        await stop.wait()
        running.finish(common_pb2.STOP)

    world.groups[0].script = slow
    return stop


@pytest.mark.usefixtures("stopped_clock")
async def test_key_limits_hold_over_both_apis_and_headers_say_what_is_left(world: World, file: Path) -> None:
    world.say("one two")
    await take(world, file, USERS + entry("few", requests_per_minute=2, tokens_per_minute=10_000))
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 8}
    first = await world.http.post("/v1/completions", json=body, headers=bearer("few"))
    used = first.json()["usage"]
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == ("2", "1")
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 10_000 - used["prompt_tokens"] - 8
    await world.http.post("/v1/completions", json=body, headers=bearer("few"))
    over = await world.http.post("/v1/completions", json=body, headers=bearer("few"))
    error = refusal(over, 429)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert int(over.headers["retry-after"]) >= 1
    assert over.headers["x-ratelimit-remaining-requests"] == "0"
    counted = (await world.http.get("/metrics", headers=bearer("ops"))).text
    assert f'code="rate_limit_exceeded",model="{MODEL}",path="/v1/completions",status="429"' in counted
    assert "prism_gateway_in_flight_requests 0.0" in counted
    async with rpc.channel(world.grpc_address) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Generate(
            gateway_pb2.GenerateRequest(model=MODEL, text="hello"), metadata=[("authorization", "Bearer few")]
        )
        assert await call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await world.http.post("/v1/completions", json=body, headers=bearer("ann"))).status_code == 200


@pytest.mark.usefixtures("stopped_clock")
async def test_quota_counts_requested_tokens_while_a_request_runs_and_generated_ones_after(
    world: World, file: Path
) -> None:
    stop = until_told(world)
    await take(world, file, USERS + entry("few", tokens_per_minute=200))
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 150}
    async with world.http.stream(
        "POST", "/v1/completions", json=body | {"stream": True}, headers=bearer("few")
    ) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        error = refusal(await world.http.post("/v1/completions", json=body, headers=bearer("few")), 429)
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        stop.set()
        async for _ in lines:
            pass
    assert (await world.http.post("/v1/completions", json=body, headers=bearer("few"))).status_code == 200
    large = await world.http.post("/v1/completions", json=body | {"max_tokens": 300}, headers=bearer("few"))
    assert refusal(large, 429)["type"] == "tokens"
    assert large.headers["x-should-retry"] == "false"


async def test_key_limit_of_answers_in_flight_leaves_other_keys_alone(world: World, file: Path) -> None:
    stop = until_told(world)
    await take(world, file, USERS + entry("few", in_flight=2))
    body = {"model": MODEL, "prompt": "hello"}
    many = await world.http.post("/v1/completions", json=body | {"n": 3}, headers=bearer("few"))
    assert "3 more were asked for; at most 2" in str(refusal(many, 429)["message"])
    async with world.http.stream(
        "POST", "/v1/completions", json=body | {"stream": True, "n": 2}, headers=bearer("few")
    ) as response:
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("data: ")
        over = await world.http.post("/v1/completions", json=body, headers=bearer("few"))
        error = refusal(over, 429)
        assert error["code"] == "too_many_in_flight" and "of the key 'few'" in str(error["message"])
        assert over.headers["retry-after"] == "1"
        stop.set()
        assert (await world.http.post("/v1/completions", json=body, headers=bearer("ann"))).status_code == 200
        async for _ in lines:
            pass
    assert (await world.http.post("/v1/completions", json=body, headers=bearer("few"))).status_code == 200


async def test_new_key_file_applies_at_once_and_streams_of_removed_keys_run_to_their_end(
    world: World, file: Path
) -> None:
    go_on = asyncio.Event()

    async def slow(running: Running) -> None:
        running.tokens(world.ids("one"))
        await go_on.wait()
        running.tokens(world.ids(" two"))
        running.finish(common_pb2.STOP)

    world.groups[0].script = slow
    body = {"model": MODEL, "prompt": "hello", "stream": True}
    async with world.http.stream("POST", "/v1/completions", json=body, headers=bearer("ann")) as response:
        lines = response.aiter_lines()
        first = await anext(lines)
        await take(world, file, entry("bob"))
        assert (await world.http.get("/v1/models", headers=bearer("ann"))).status_code == 401
        assert (await world.http.get("/v1/models", headers=bearer("bob"))).status_code == 200
        go_on.set()
        rest = [line async for line in lines]
    assert "one" in first and any("two" in line for line in rest) and rest[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("bad", ["[[key]", "[[key]]\nname = 'x'\n", None])
async def test_invalid_new_key_file_changes_nothing_and_is_logged_once(
    world: World, file: Path, bad: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if bad is None:
        file.unlink()
    else:
        write(file, bad)
    (followed,) = world.service._followed
    assert not followed.refresh() and not followed.refresh()
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("new file refused") == 1
    assert str(file) in printed.out + printed.err
    assert (await world.http.get("/v1/models", headers=bearer("ann"))).status_code == 200
    await take(world, file, entry("bob"))
    assert (await world.http.get("/v1/models", headers=bearer("bob"))).status_code == 200


async def test_running_gateway_reads_a_new_key_file_by_itself_and_at_sighup(world: World, file: Path) -> None:
    write(file, entry("bob"))
    while (await world.http.get("/v1/models", headers=bearer("bob"))).status_code != 200:
        await asyncio.sleep(0.02)
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, world.service._hangup.set)
    write(file, entry("carol"))
    os.kill(os.getpid(), signal.SIGHUP)
    while (await world.http.get("/v1/models", headers=bearer("carol"))).status_code != 200:
        await asyncio.sleep(0.02)


async def test_a_key_is_never_logged_but_its_name_is(
    world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*args: Any) -> None:
        raise RuntimeError("by the test")

    monkeypatch.setattr("gateway.serving.Serving.begin", broken)
    processors = [structlog.contextvars.merge_contextvars, structlog.dev.ConsoleRenderer(exception_formatter=PLAIN)]
    structlog.configure(processors=processors)
    secret = keys.new()
    (followed,) = world.service._followed
    followed.value = keys.Keys([keys.Key(name="dora", hash=keys.digest(secret))])
    answer = await world.http.post("/v1/completions", json={"model": MODEL, "prompt": "a"}, headers=bearer(secret))
    assert answer.status_code == 500
    structlog.reset_defaults()
    printed = capsys.readouterr()
    assert "dora" in printed.out + printed.err
    assert secret not in printed.out + printed.err


async def test_connection_stays_usable_after_a_refused_key(world: World) -> None:
    async with httpx.AsyncClient(
        base_url=world.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=1)
    ) as client:
        body = {"model": MODEL, "prompt": "x" * 100_000}
        assert (await client.post("/v1/completions", json=body)).status_code == 401
        assert (await client.get("/v1/models", headers=bearer("ann"))).status_code == 200
