import gc
import socket
import subprocess
import sys
import time
import weakref

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.telemetry import otlp, tracing
from services.telemetry.spans import UNTRACED
from testing.patience import PATIENCE_S
from tests.collector import Collector

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch):
    with Collector() as it:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", it.endpoint)
        yield it


def test_tracing_without_start_does_nothing_and_does_not_import_opentelemetry():
    code = (
        "import sys, gateway.__main__, gpu_scheduler.__main__\n"
        "from services.telemetry import tracing\n"
        "span = tracing.begin('a', 'server', traceparent='00-' + '1' * 32 + '-' + '2' * 16 + '-01')\n"
        "child = span.child('b')\n"
        "child.set({'c': 1}), child.event('d'), child.fail('e'), child.end()\n"
        "print(span.recorded, repr(child.traceparent), child.log_fields)\n"
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False '' {}", "[]"], done.stderr


async def test_spans_arrive_with_their_times_attributes_events_links_and_errors(collector):
    close = tracing.start("a-service", {"prism.group": "cpu:0"}, flush_s=PATIENCE_S)
    now = time.monotonic()
    wall_ns = time.time_ns()
    other = tracing.begin("other")
    other.end()
    root = tracing.begin("root", "server", at_s=now - 2)
    child = root.child("child", "client", at_s=now - 1.5, link=other)
    child.set({"text": "x", "number": 3, "several": ["a", "b"]})
    child.event("halfway")
    child.fail("Unavailable", "nobody there")
    child.end(now - 0.5)
    child.end(now)
    root.end(now)
    await close()
    seen = {span.name: span for span in collector.spans}
    assert set(seen) == {"other", "root", "child"}
    assert seen["root"].service == "a-service" and seen["root"].resource["prism.group"] == "cpu:0"
    assert (seen["root"].kind, seen["root"].parent) == ("server", "")
    assert (seen["child"].kind, seen["child"].parent, seen["child"].trace) == (
        "client",
        seen["root"].id,
        seen["root"].trace,
    )
    assert seen["child"].attributes == {
        "text": "x",
        "number": 3,
        "several": ["a", "b"],
        "error.type": "Unavailable",
    }
    assert seen["child"].failed and not seen["root"].failed
    assert seen["child"].events == ("halfway",)
    assert seen["child"].links == ((seen["other"].trace, seen["other"].id),)
    assert seen["child"].end_ns - seen["child"].start_ns == pytest.approx(1e9, abs=2)
    assert seen["root"].end_ns - seen["root"].start_ns == pytest.approx(2e9, abs=2)
    assert abs(seen["root"].end_ns - wall_ns) < 60e9


async def test_trace_of_a_caller_is_continued_as_its_sampling_flag_says(collector):
    close = tracing.start("a-service", flush_s=PATIENCE_S)
    followed = tracing.begin("followed", traceparent=f"00-{TRACE}-{PARENT}-01")
    assert followed.log_fields == {"trace_id": TRACE}
    version, trace, own, flags = followed.traceparent.split("-")
    assert (version, trace, flags) == ("00", TRACE, "01") and own != PARENT
    followed.end()
    assert tracing.begin("left out", traceparent=f"00-{TRACE}-{PARENT}-00") is UNTRACED
    broken = tracing.begin("broken", traceparent="00-nonsense")
    assert broken.recorded
    broken.end()
    await close()
    seen = {span.name: span for span in collector.spans}
    assert set(seen) == {"followed", "broken"}
    assert (seen["followed"].trace, seen["followed"].parent) == (TRACE, PARENT)
    assert seen["broken"].trace != TRACE and seen["broken"].parent == ""


async def test_tracing_uses_the_sampler_of_the_environment(collector, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    close = tracing.start("a-service", flush_s=PATIENCE_S)
    assert tracing.begin("root") is UNTRACED
    assert tracing.begin("child", traceparent=f"00-{TRACE}-{PARENT}-01").recorded
    await close()


async def test_tracing_after_its_end_records_nothing_and_restores_the_switch_interval(collector):
    before = sys.getswitchinterval()
    close = tracing.start("a-service", flush_s=PATIENCE_S)
    assert sys.getswitchinterval() < before
    await close()
    assert sys.getswitchinterval() == before
    assert tracing.begin("late") is UNTRACED


async def test_collector_that_never_answers_costs_at_most_a_queue_of_spans_and_a_bounded_stop(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        close = tracing.start("a-service", flush_s=0.01)
        made = []
        for _ in range(1000):
            span = tracing.begin("root")
            made.append(weakref.ref(span._span))
            span.end()
        del span
        gc.collect()
        assert sum(one() is not None for one in made) <= 100 + 50  # the queue, and the batch under way
        await close()


def test_lost_spans_are_logged_at_most_once_a_minute_and_all_counted(monkeypatch):
    told = []
    clock = [0.0]

    class Log:
        def warning(self, text, **facts):
            told.append((clock[0], facts))

    class Exporter(SpanExporter):
        result = SpanExportResult.FAILURE

        def export(self, spans):
            return self.result

    monkeypatch.setattr(otlp, "_log", Log())
    exporter = otlp._Telling(Exporter(), lambda: clock[0])
    for clock[0], count in ((0.0, 3), (5.0, 4), (59.0, 5), (60.0, 6), (70.0, 7)):
        assert exporter.export([None] * count) is SpanExportResult.FAILURE
    Exporter.result = SpanExportResult.SUCCESS
    clock[0] = 200.0
    assert exporter.export([None]) is SpanExportResult.SUCCESS
    assert told == [(0.0, {"lost": 3}), (60.0, {"lost": 15})]
