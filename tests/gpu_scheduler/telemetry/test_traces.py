from math import inf

import pytest

from gpu_scheduler.residents import Resident
from gpu_scheduler.telemetry import traces
from gpu_scheduler.telemetry.traces import RequestTrace
from protos import common_pb2, engine_pb2
from services.telemetry import tracing
from services.telemetry.spans import UNTRACED
from testing.patience import PATIENCE_S
from tests.collector import Collector

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector(monkeypatch):
    with Collector() as it:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", it.endpoint)
        yield it


def resident():
    return Resident(common_pb2.ModelSpec(name="m"), common_pb2.ACTIVE)


def end(trace, now, finish=common_pb2.STOP, deadline=inf, error=""):
    trace.end(
        now,
        model="m",
        finish=finish,
        error=error,
        prompt_tokens=10,
        output_tokens=3,
        resumed_tokens=0,
        deadline=deadline,
    )


def steps(spans, name="llm_request"):
    """The span of that name, and (name, seconds after its begin, seconds long) of its children in their order."""
    (parent,) = [span for span in spans if span.name == name]
    children = sorted((span for span in spans if span.parent == parent.id), key=lambda span: span.start_ns)
    return parent, [
        (
            span.name,
            pytest.approx((span.start_ns - parent.start_ns) / 1e9, abs=1e-6),
            pytest.approx((span.end_ns - span.start_ns) / 1e9, abs=1e-6),
        )
        for span in children
    ]


async def test_a_retracted_request_waits_and_prefills_again_and_its_times_are_summed(collector):
    close = tracing.start("group", flush_s=PATIENCE_S)
    trace = RequestTrace.of(TRACEPARENT, 100.0, 0.5, waking=False)
    trace.sent(101.0, "on_time", resident())
    trace.first_token(103.0, cached_tokens=4)
    trace.parked(106.0)
    trace.sent(110.0, "room", resident())
    trace.first_token(115.0, cached_tokens=9)
    end(trace, 121.0, deadline=103.5)
    await close()
    request, parts = steps(collector.spans)
    assert parts == [
        ("queue", 0, 1),
        ("prefill", 1, 2),
        ("decode", 3, 3),
        ("queue", 6, 4),
        ("prefill", 10, 5),
        ("decode", 15, 6),
    ]
    facts = request.attributes
    assert (facts["prism.retractions"], facts["prism.start"], facts["prism.slack_s"]) == (1, "on_time", 0.5)
    assert facts["prism.on_time"] is True
    assert facts["gen_ai.usage.cache_read.input_tokens"] == 4
    assert {name.rpartition(".")[2]: value for name, value in facts.items() if name.startswith("gen_ai.latency.")} == {
        "time_in_queue": 5.0,
        "time_in_model_prefill": 7.0,
        "time_in_model_decode": 9.0,
        "time_to_first_token": 3.0,
        "e2e": 21.0,
    }
    assert not request.failed


async def test_a_request_that_is_dropped_late_only_waited_and_failed(collector):
    close = tracing.start("group", flush_s=PATIENCE_S)
    end(RequestTrace.of(TRACEPARENT, 100.0, -0.1, waking=False), 102.0, common_pb2.LATE, 101.0, "too late")
    await close()
    request, parts = steps(collector.spans)
    assert parts == [("queue", 0, 2)]
    assert request.failed and request.attributes["error.type"] == "late"
    assert request.attributes["prism.on_time"] is False
    assert not {"prism.start", "gen_ai.latency.time_to_first_token"} & set(request.attributes)


async def test_trace_without_a_target_has_no_slack_and_is_not_called_on_time(collector):
    close = tracing.start("group", flush_s=PATIENCE_S)
    end(RequestTrace.of(TRACEPARENT, 100.0, inf, waking=False), 102.0, common_pb2.ABORTED)
    await close()
    request, _ = steps(collector.spans)
    assert not {"prism.on_time", "prism.slack_s"} & set(request.attributes) and not request.failed


async def test_trace_links_to_a_wake_up_only_from_the_wait_for_it(collector):
    close = tracing.start("group", flush_s=PATIENCE_S)
    woken = resident()
    woken.steps = [("making room", 90.0), ("copying weights", 91.0), ("", 95.0)]
    woken.weights_from, woken.measured = ["image"], engine_pb2.Measured(weights_bytes=800)
    woken.activation = traces.activation(woken, asleep=True, began_s=90.0)
    traces.activated(woken, 95.0)
    for waking in (True, False):
        trace = RequestTrace.of(TRACEPARENT, 94.0, inf, waking)
        trace.sent(96.0, "room", woken)
        trace.parked(97.0)
        trace.sent(98.0, "room", woken)
        end(trace, 99.0)
    await close()
    activation, parts = steps(collector.spans, "activate")
    assert parts == [("making room", 0, 1), ("copying weights", 1, 4)]
    assert activation.attributes["prism.weights.bytes_per_s"] == 200.0
    links = [span.links for span in collector.spans if span.name == "queue"]
    assert links == [((activation.trace, activation.id),), (), (), ()]


async def test_an_activation_that_fails_ends_with_its_last_step_and_the_error(collector):
    close = tracing.start("group", flush_s=PATIENCE_S)
    failed = resident()
    failed.steps = [("making room", 90.0), ("verifying", 91.0)]
    failed.activation = traces.activation(failed, asleep=False, began_s=90.0)
    traces.activated(failed, 93.0, ValueError("no"))
    await close()
    activation, parts = steps(collector.spans, "activate")
    assert parts == [("making room", 0, 1), ("verifying", 1, 2)]
    assert activation.failed and activation.attributes["error.type"] == "ValueError"


def test_request_not_traced_by_its_gateway_has_no_trace():
    assert RequestTrace.of("", 1.0, 0.0, waking=False) is None
    assert RequestTrace.of(TRACEPARENT, 1.0, 0.0, waking=False) is None  # traces are off here
    traces.activated(resident(), 1.0)
    assert resident().activation is UNTRACED
