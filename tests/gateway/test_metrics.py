"""Series by model, and what is counted of each request."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway import metrics
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.rpc import rpc
from testing.patience import PATIENCE_S
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running
from tests.gateway.test_app import refusal
from tests.gateway.test_grpc_api import ask, generate
from tests.gateway.test_keys_wire import bearer, entry

CHAT, GENERATE = "/v1/chat/completions", "prism.gateway.v1.Inference/Generate"
Counted = Counter[tuple[str, ...]]


def counted(model: str) -> set[str]:
    return {
        sample.name
        for metric in (metrics.REQUESTS, metrics.ANSWERS, metrics.TTFT, metrics.SLO)
        for family in metric.collect()
        for sample in family.samples
        if sample.labels.get("model") == model
    }


def test_metrics_series_of_a_removed_model_go_and_those_of_others_stay() -> None:
    series = metrics.Series()
    series({"going": None, "staying": None})
    for model in ("going", "staying"):
        metrics.REQUESTS.labels(model, "/v1/completions", "200", "").inc()
        metrics.TTFT.labels(model).observe(0.1)
        metrics.SLO.labels(model, "ttft", "true").inc()
    series({"staying": None})
    assert not counted("going") and len(counted("staying")) > 3


def test_metrics_series_counted_after_its_model_left_is_removed_at_the_next_change() -> None:
    series = metrics.Series()
    series({"first": None, "second": None})
    series({"second": None})
    metrics.ANSWERS.labels("first", "stop").inc()
    series({})
    assert not counted("first")


def test_metrics_count_a_model_that_is_back_from_then_on() -> None:
    series = metrics.Series()
    series({"a": None, "b": None})
    series({"b": None})
    series({"a": None, "b": None})
    metrics.ANSWERS.labels("a", "stop").inc()
    series({"a": None})
    assert counted("a")


def counts(counter: Any, *labels: str) -> Counted:
    found: Counted = Counter()
    for family in counter.collect():
        for sample in family.samples:
            if sample.name.endswith("_total"):
                found[tuple(sample.labels[label] for label in labels)] += int(sample.value)
    return found


def requests() -> Counted:
    """By model, path, status and code."""
    return counts(metrics.REQUESTS, "model", "path", "status", "code")


def answers() -> Counted:
    """By model and outcome."""
    return counts(metrics.ANSWERS, "model", "outcome")


class Since:
    """What was counted since this was made."""

    def __init__(self) -> None:
        self._before = requests(), answers()

    @property
    def requests(self) -> Counted:
        return requests() - self._before[0]

    @property
    def answers(self) -> Counted:
        return answers() - self._before[1]

    async def all_requests(self, count: int) -> Counted:
        """Those, as soon as there are so many: a count comes behind the answer."""
        async with asyncio.timeout(PATIENCE_S):
            while self.requests.total() < count:
                await asyncio.sleep(0.005)
        return self.requests


@pytest.mark.parametrize("stream", [False, True])
async def test_metrics_count_a_request_once_however_many_answers_it_has(world: World, stream: bool) -> None:
    world.say("one")
    since = Since()
    assert (await world.chat(n=3, stream=stream)).status_code == 200
    assert (await world.complete(prompt=["a", "b"], stream=stream)).status_code == 200
    assert await since.all_requests(2) == {
        (MODEL, CHAT, "200", ""): 1,
        (MODEL, "/v1/completions", "200", ""): 1,
    }
    assert since.answers == {(MODEL, "stop"): 5}


async def test_metrics_count_refusals_by_status_code_and_model(world: World) -> None:
    broken = world.route(name="org/broken", residency=common_pb2.ERROR, error="tensor x is missing")
    await world.publish(world.route(fakes.place(world.groups[0])), broken)
    since = Since()
    refusal(await world.chat(model="org/broken"), 503)
    refusal(await world.chat(model="made up"), 404)
    refusal(await world.chat(temperature=3), 400)
    refusal(await world.chat(max_tokens=10_000), 400)
    refusal(await world.chat(suffix="x"), 400)
    refusal(await world.chat(model=7), 400)
    post = world.http.post
    refusal(await post(CHAT, content=b"{"), 400)
    refusal(await post(CHAT, json=world.body(), headers={"x-slo-ttft-ms": "soon"}), 400)
    refusal(await post(CHAT, content=b"", headers={"content-encoding": "br"}), 415)
    refusal(await post("/v1/embeddings", json={"model": MODEL, "input": "a"}), 400)
    refusal(await post("/tokenize", json={"model": "org/broken"}), 400)
    refusal(await post("/tokenize", json={"model": MODEL, "prompt": 3}), 400)
    refusal(await post("/detokenize", json={"model": MODEL}), 400)
    refusal(await post("/tokenize", json={"model": "made up", "messages": []}), 400)
    assert (await post("/detokenize", json={"model": MODEL, "tokens": [5]})).status_code == 200
    refusal(await post("/detokenize", json={"model": "made up", "tokens": [5]}), 404)
    refusal(await world.http.get(CHAT), 405)
    refusal(await world.http.get("/any/path"), 404)
    refusal(await world.http.get("/v1/models/made-up"), 404)
    assert (await world.http.get(f"/v1/models/{MODEL}")).status_code == 200
    assert await since.all_requests(20) == {
        ("org/broken", CHAT, "503", "model_error"): 1,
        ("", CHAT, "404", "model_not_found"): 1,
        (MODEL, CHAT, "400", "above_max_value"): 1,
        (MODEL, CHAT, "400", "context_length_exceeded"): 1,
        (MODEL, CHAT, "400", "unsupported_parameter"): 1,
        ("", CHAT, "400", "invalid_type"): 1,
        ("", CHAT, "400", "invalid_json"): 1,
        (MODEL, CHAT, "400", "invalid_value"): 1,
        ("", CHAT, "415", "unsupported_encoding"): 1,
        (MODEL, "/v1/embeddings", "400", "wrong_task"): 1,
        ("org/broken", "/tokenize", "400", "invalid_value"): 1,
        (MODEL, "/tokenize", "400", "invalid_type"): 1,
        (MODEL, "/detokenize", "400", "missing_required_parameter"): 1,
        ("", "/tokenize", "400", "array_too_short"): 1,
        (MODEL, "/detokenize", "200", ""): 1,
        ("", "/detokenize", "404", "model_not_found"): 1,
        ("", CHAT, "405", "method_not_allowed"): 1,
        ("", "other", "404", "unknown_url"): 1,
        ("", "/v1/models/{model}", "404", "model_not_found"): 1,
        (MODEL, "/v1/models/{model}", "200", ""): 1,
    }
    assert not since.answers, "none was made"


async def test_metrics_count_a_failed_stream_as_a_200_with_its_error_code(world: World) -> None:
    async def breaks(running: Running) -> None:
        running.tokens(world.ids("one"))
        running.finish(common_pb2.ABORTED, "its engine is gone")

    world.groups[0].script = breaks
    since = Since()
    assert (await world.chat(stream=True)).status_code == 200
    refusal(await world.chat(), 503)
    assert await since.all_requests(2) == {
        (MODEL, CHAT, "200", "unavailable"): 1,
        (MODEL, CHAT, "503", "unavailable"): 1,
    }
    assert since.answers == {(MODEL, "failed"): 2}


@pytest.mark.parametrize("stream", [False, True])
async def test_metrics_count_internal_errors_with_a_code(
    world: World, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr("gateway.http.sse.ChatEvents.finish", broken)
    monkeypatch.setattr("gateway.openai.completions.ChatForm.choice", broken)
    monkeypatch.setattr("gateway.app.Endpoints.card", broken)
    world.say("one")
    since = Since()
    assert (await world.chat(stream=stream)).status_code == (200 if stream else 500)
    refusal(await world.http.get("/v1/models"), 500)
    assert await since.all_requests(2) == {
        (MODEL, CHAT, "200" if stream else "500", "fault"): 1,
        ("", "/v1/models", "500", "fault"): 1,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_metrics_count_a_client_that_leaves_as_client_gone(world: World, stream: bool) -> None:
    async def endless(running: Running) -> None:
        running.tokens(world.ids("one"))
        await running.cancelled.wait()

    world.groups[0].script = endless
    since = Since()
    async with httpx.AsyncClient(base_url=world.url, timeout=PATIENCE_S) as leaving:
        async with leaving.stream("POST", CHAT, json=world.body(stream=True)) as answer:
            if stream:
                await anext(answer.aiter_lines())
        if not stream:
            going = asyncio.get_running_loop().create_task(leaving.post(CHAT, json=world.body()))
            await asyncio.wait_for(world.groups[0].arrived(2), PATIENCE_S)
            going.cancel()
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    _, half = await asyncio.open_connection(host, int(port))
    half.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n{" % CHAT.encode())
    await half.drain()
    half.close()
    streamed, whole = (MODEL, CHAT, "200", "client_gone"), (MODEL, CHAT, "499", "client_gone")
    bodiless = ("", CHAT, "499", "client_gone")
    expected = {streamed: 1, bodiless: 1} | ({} if stream else {whole: 1})
    assert await since.all_requests(len(expected)) == expected


async def test_metrics_malformed_requests_count_too(world: World) -> None:
    host, _, port = world.url.removeprefix("http://").rpartition(":")
    since = Since()
    for sent in (b"nonsense\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /" + b"a" * 100_000):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        try:
            await reader.read()
        except ConnectionResetError:  # it closed with something unread
            pass
        writer.close()
    assert await since.all_requests(3) == {
        ("", "other", "400", "no_http"): 1,
        ("", "other", "505", "http_version"): 1,
        ("", "other", "431", "head_too_large"): 1,
    }


async def test_metrics_count_grpc_calls_by_the_same_statuses(world: World) -> None:
    world.say("one")
    since = Since()
    await generate(world, ask())
    for wrong in (ask(stop=[""]), gateway_pb2.GenerateRequest(model="made up", text="a")):
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(world, wrong)

    async def endless(running: Running) -> None:
        running.tokens(world.ids("one"))
        await running.cancelled.wait()

    world.groups[0].script = endless
    async with rpc.channel(world.grpc_address) as channel:
        stub = gateway_pb2_grpc.InferenceStub(channel)
        await stub.ListModels(gateway_pb2.ListModelsRequest())
        call = stub.Generate(ask())
        await call.read()
        call.cancel()
    assert await since.all_requests(5) == {
        (MODEL, GENERATE, "200", ""): 1,
        (MODEL, GENERATE, "400", "invalid_value"): 1,
        ("", GENERATE, "404", "model_not_found"): 1,
        ("", GENERATE.replace("Generate", "ListModels"), "200", ""): 1,
        (MODEL, GENERATE, "499", "client_gone"): 1,
    }
    assert since.answers == {(MODEL, "stop"): 1, (MODEL, "cancelled"): 1}


class TestWithKeys:
    @pytest.fixture
    def settings(self, tmp_path: Path) -> dict[str, Any]:
        file = tmp_path / "keys.toml"
        file.write_text(entry("ann", models=["else/*"]) + entry("ops", admin=True, requests_per_minute=1))
        return {"keys_file": str(file), "cors_origins": ["http://page"]}

    @pytest.fixture
    def key(self) -> str:
        return "ops"

    @pytest.mark.usefixtures("stopped_clock")
    async def test_metrics_requests_without_a_key_count_without_a_model_name(self, world: World) -> None:
        world.say("one")
        since = Since()
        refusal(await world.chat(), 401)
        refusal(await world.http.get("/metrics", headers=bearer("ann")), 403)
        for status in (200, 429):
            answer = await world.http.post(CHAT, json=world.body(), headers=bearer("ops"))
            assert answer.status_code == status
        refusal(await world.http.post(CHAT, json=world.body(), headers=bearer("ann")), 404)
        asking = {"origin": "http://page", "access-control-request-method": "POST"}
        assert (await world.http.options(CHAT, headers=asking)).status_code == 204
        refusal(await world.http.options(CHAT, headers=asking | {"origin": "http://other"}), 403)
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(world, ask())
        assert await since.all_requests(8) == {
            ("", CHAT, "401", "invalid_api_key"): 1,
            ("", "/metrics", "403", "denied"): 1,
            (MODEL, CHAT, "200", ""): 1,
            (MODEL, CHAT, "429", "rate_limit_exceeded"): 1,
            ("", CHAT, "404", "model_not_found"): 1,
            ("", CHAT, "204", ""): 1,
            ("", CHAT, "403", "denied"): 1,
            ("", GENERATE, "401", "invalid_api_key"): 1,
        }
