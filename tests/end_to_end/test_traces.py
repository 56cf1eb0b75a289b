"""Traces of a whole system with echo engines, as a collector gets them."""

import json
import os
import re
import secrets
import signal

import pytest
import pytest_asyncio

from loader.client import LoaderClient
from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.rpc import rpc
from testing.systems.local import MODELS, ROOT, world
from tests.collector import Collector

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = list(range(20, 60))
GROUPS = ("cpu:0", "cpu:1")
ENVIRONMENT = {
    "OTEL_BSP_SCHEDULE_DELAY": "20",  # ms: what a test waits for
    "OTEL_SERVICE_NAME": "not one for all processes",
}


@pytest.fixture(scope="module")
def collector():
    with Collector() as it:
        yield it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(collector):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint}.items():
            patch.setenv(name, value)
        async with world(
            "echo",
            options={"step_ms": "20"},
            idle_s=0.2,
            devices=dict.fromkeys(GROUPS, 32 << 20),
            traces=True,
        ) as it:
            yield it


def sender(sampled=True):
    """(trace, parent, headers) of a client that traces."""
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    return trace, parent, {"traceparent": f"00-{trace}-{parent}-0{int(sampled)}"}


def body(model, tokens, **keys):
    return {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, **keys}


def one(spans, name):
    (span,) = [span for span in spans if span.name == name]
    return span


def children(spans, parent):
    return [span for span in spans if span.parent == parent.id]


async def whole_trace(collector, trace, name):
    """All spans of a request's trace: the gateway's first span ends last, and what the group sends comes by itself."""

    def complete(spans):
        mine = [span for span in spans if span.trace == trace]
        attempts = [span for span in mine if span.name == "attempt" and "prism.cancelled" not in span.attributes]
        taken = [span for span in attempts if span.attributes.get("error.type") != "not_here"]
        return any(span.name == name for span in mine) and all(children(mine, span) for span in taken) and mine

    return await collector.until(complete)


async def test_trace_of_a_request_is_one_tree_over_processes_linked_to_its_activation(traced, collector):
    status, _ = await traced.post("/v1/completions", body(MODELS[0], 8, seed=3), headers={"x-request-id": "cold"})
    assert status == 200
    request = await collector.until(
        lambda spans: next((one for one in spans if one.attributes.get("gen_ai.request.id") == "cold"), None)
    )
    spans = await whole_trace(collector, request.trace, "POST /v1/completions")
    group = one(spans, "llm_request")
    assert request.parent == "" and request.kind == "server" and request.service == "gateway"
    assert {span.name for span in children(spans, request)} == {"tokenize", "find place", "attempt"}
    attempt = one(spans, "attempt")
    assert attempt.kind == "client" and attempt.events == ("first token",)
    assert group.parent == attempt.id and group.kind == "server"
    assert group.resource["prism.group"] == attempt.attributes["prism.group"] in GROUPS
    assert group.service == "gpu_scheduler-" + group.resource["prism.group"].replace(":", "-")
    phases = sorted(children(spans, group), key=lambda span: span.start_ns)
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert [phases[0].start_ns, phases[-1].end_ns] == [group.start_ns, group.end_ns]
    assert [span.end_ns for span in phases[:-1]] == [span.start_ns for span in phases[1:]]
    assert len(spans) == 8
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "prism",
        "gen_ai.request.id": "cold",
        "gen_ai.request.model": MODELS[0],
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": MODELS[0],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": request.attributes["gen_ai.response.time_to_first_chunk"],
        "gen_ai.usage.input_tokens": len(PROMPT),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 8,
    }
    assert group.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert group.attributes["gen_ai.usage.output_tokens"] == 8
    assert group.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert one(spans, "find place").attributes["prism.residency"] in ("on_disk", "cold")

    ((trace, id),) = phases[0].links
    assert trace != request.trace
    await collector.until(lambda all_: any(span.id == id for span in all_))
    activation = one(collector.trace(trace), "activate")
    assert (activation.id, activation.parent, activation.service) == (id, "", group.service)
    assert activation.attributes["gen_ai.request.model"] == MODELS[0]
    assert activation.attributes["prism.weights.from"] == ["checkpoint"]
    steps = children(collector.trace(trace), activation)
    assert {span.name for span in steps} == {"making room", "taking an engine", "reading the checkpoint"}
    assert activation.start_ns <= min(span.start_ns for span in steps)
    assert activation.end_ns == max(span.end_ns for span in steps)


async def test_trace_of_a_client_continues_over_http_and_grpc_and_is_exported_only_if_sampled(traced, collector):
    left_out, _, headers = sender(sampled=False)
    await traced.post("/v1/completions", body(MODELS[0], 4), headers=headers)
    trace, parent, headers = sender()
    chat = {"model": MODELS[0], "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    slo = {"x-slo-ttft-ms": "60000"}
    status, _ = await traced.post("/v1/chat/completions", chat, headers={**headers, **slo})
    assert status == 200
    spans = await whole_trace(collector, trace, "POST /v1/chat/completions")
    request = one(spans, "POST /v1/chat/completions")
    assert request.parent == parent and request.attributes["gen_ai.operation.name"] == "chat"
    assert one(spans, "llm_request").attributes["prism.on_time"] is True
    assert 0 < one(spans, "llm_request").attributes["prism.slack_s"] < 60

    trace, parent, headers = sender()
    async with rpc.channel(traced.local.unix("gateway")) as channel:
        call = gateway_pb2_grpc.InferenceStub(channel).Generate(
            gateway_pb2.GenerateRequest(
                model=MODELS[0], text="x", sampling=common_pb2.Sampling(max_new_tokens=4), request_id="by-grpc"
            ),
            metadata=tuple(headers.items()),
        )
        assert [answer async for answer in call][-1].completion_tokens == 4
    spans = await whole_trace(collector, trace, "prism.gateway.v1.Inference/Generate")
    request = one(spans, "prism.gateway.v1.Inference/Generate")
    assert request.parent == parent and request.attributes["rpc.system"] == "grpc"
    assert request.attributes["gen_ai.request.id"] == "by-grpc"
    assert one(spans, "llm_request").parent == one(spans, "attempt").id
    # Those that came later are here, in order: a process exports its spans in the order of their ends.
    assert collector.trace(left_out) == []


async def test_trace_of_a_refused_request_has_its_status_and_no_attempt(traced, collector):
    trace, _, headers = sender()
    status, _ = await traced.post("/v1/completions", body("no-such-model", 4), headers=headers)
    assert status == 404
    (request,) = await whole_trace(collector, trace, "POST /v1/completions")
    assert request.attributes["http.response.status_code"] == 404
    assert not request.failed and "gen_ai.usage.output_tokens" not in request.attributes


async def test_trace_of_a_client_that_goes_away_has_a_cancelled_attempt(traced, collector):
    trace, _, headers = sender()
    streamed = body(MODELS[0], 400, stream=True)
    async with traced.http.post(traced.base + "/v1/completions", json=streamed, headers=headers) as answer:
        await answer.content.readline()
    await whole_trace(collector, trace, "POST /v1/completions")
    spans = await collector.until(
        lambda all_: any(span.trace == trace and span.name == "llm_request" for span in all_) and collector.trace(trace)
    )
    assert one(spans, "POST /v1/completions").attributes["error.type"] == "client_gone"
    assert one(spans, "attempt").attributes["prism.cancelled"] is True
    assert one(spans, "llm_request").attributes["gen_ai.response.finish_reasons"] == ["aborted"]
    assert not one(spans, "llm_request").failed


async def test_trace_of_a_request_whose_engine_is_killed_has_two_attempts_and_is_in_its_log_lines(traced, collector):
    trace, _, headers = sender()
    tokens = 300
    streamed = body(MODELS[0], tokens, stream=True, stream_options={"include_usage": True})
    async with traced.http.post(traced.base + "/v1/completions", json=streamed, headers=headers) as answer:
        await answer.content.readline()
        for pid in traced.engine_pids():
            os.kill(pid, signal.SIGKILL)
        events = [json.loads(line[6:]) async for line in answer.content if line.startswith(b"data: {")]
    assert events[-1]["usage"]["completion_tokens"] == tokens
    spans = await whole_trace(collector, trace, "POST /v1/completions")
    attempts = sorted(
        (span for span in spans if span.name == "attempt"), key=lambda span: span.attributes["prism.attempt"]
    )
    first, last = attempts[0], attempts[-1]
    assert [span.attributes["prism.attempt"] for span in attempts] == list(range(1, len(attempts) + 1))
    assert len(attempts) >= 2 and first.failed and not last.failed
    assert first.attributes["error.type"] == "failed" and first.attributes["prism.resumed_tokens"] == 0
    (before,), (after,) = children(spans, first), children(spans, last)
    assert before.failed and before.attributes["gen_ai.response.finish_reasons"] == ["failed"]
    said = before.attributes["gen_ai.usage.output_tokens"]
    assert 0 < said == last.attributes["prism.resumed_tokens"] == after.attributes["prism.resumed_tokens"]
    assert said + after.attributes["gen_ai.usage.output_tokens"] == tokens
    assert one(spans, "POST /v1/completions").attributes["gen_ai.usage.output_tokens"] == tokens
    lines = (traced.local.state / "logs" / "gateway.log").read_text().splitlines()
    assert any(trace in line and "stream paused" in line for line in lines)


async def test_trace_of_an_activation_that_copies_weights_has_its_bytes_and_rate(traced, collector):
    """A model that was brought down to its image comes back by the loader's copy."""
    await traced.complete(MODELS[1], PROMPT, 2)
    loader = LoaderClient(traced.local.unix("loader"))

    async def has_image():
        return (await loader.state(MODELS[1])).entry.has_image

    await traced.until(has_image, "no image was made")
    await loader.close()
    await traced.evict(MODELS[1], common_pb2.HIBERNATING)
    await traced.wait_residency(MODELS[1], common_pb2.HIBERNATING)
    await traced.complete(MODELS[1], PROMPT, 2)
    activation = await collector.until(
        lambda spans: next(
            (
                span
                for span in spans
                if span.name == "activate" and span.attributes.get("prism.activation.source") == "hibernation"
            ),
            None,
        )
    )
    facts = activation.attributes
    (copying,) = [s for s in children(collector.trace(activation.trace), activation) if s.name == "copying weights"]
    assert facts["prism.weights.from"] == ["image"] and facts["prism.weights.bytes"] > 0
    copied = facts["prism.weights.bytes_per_s"] * (copying.end_ns - copying.start_ns) / 1e9
    assert copied == pytest.approx(facts["prism.weights.bytes"], rel=1e-3)


DOCUMENTED = (ROOT / "docs" / "operate" / "monitoring.md").read_text().partition("## Traces")[2].partition("\n## ")[0]


async def test_spans_events_and_attributes_are_those_of_the_documentation(traced, collector):
    trace, _, headers = sender()
    await traced.post("/v1/completions", body(MODELS[0], 2), headers=headers)
    await whole_trace(collector, trace, "POST /v1/completions")
    named = set(re.findall(r"`([^`]+)`", DOCUMENTED))
    for span in collector.spans:
        of_process = {name for name in span.resource if not name.startswith("telemetry.")}
        assert {span.name, *span.attributes, *span.events, *of_process} <= named, span


async def test_requests_are_answered_while_the_collector_is_away(traced, collector):
    collector.close()
    for _ in range(3):
        await traced.complete(MODELS[0], PROMPT, 2)
    trace, _, headers = sender()
    status, _ = await traced.post("/v1/completions", body(MODELS[0], 2), headers=headers)
    assert status == 200 and collector.trace(trace) == []
