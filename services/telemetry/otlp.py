"""Exports spans with OpenTelemetry's SDK to a collector, by OTLP over HTTP. Imported only when traces are on.

The SDK's own environment variables set everything else: OTEL_EXPORTER_OTLP_ENDPOINT and _HEADERS, OTEL_TRACES_SAMPLER,
OTEL_BSP_* for the queue. A thread of its own exports, in batches; spans that do not fit the queue are dropped, oldest
first, so that a collector that is away costs its traces and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.telemetry import log
from services.telemetry.spans import UNTRACED, Attributes, Kind, Span

_log = log.get(__name__)
_TELL_EVERY_S = 60.0
_SWITCH_S = 0.0005
"""Interpreter switch interval in seconds. Encoding a batch of spans is Python that does not release the interpreter by
itself: on two cores 3 to 13 % of tokens were more than a step late because of it; with this interval 0 to 2 % are."""
_KINDS = {"internal": trace.SpanKind.INTERNAL, "server": trace.SpanKind.SERVER, "client": trace.SpanKind.CLIENT}


class OtlpTracer:
    """A tracer that exports by OTLP (`services.telemetry.tracing.Tracer`)."""

    def __init__(self, service: str, resource: Attributes, flush_s: float) -> None:
        """`flush_s`: most seconds that `close` waits for spans that were not sent yet."""
        self._flush_s = flush_s
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(_SWITCH_S, self._switch_s))
        # The exporter logs the same with every batch; `_Telling` logs it now and then.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        facts = {"service.namespace": "prism", SERVICE_NAME: service, **resource}
        self._provider = TracerProvider(resource=Resource.create(facts), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Telling(OTLPSpanExporter())))
        self._tracer = self._provider.get_tracer("prism")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, kind: Kind, traceparent: str, tracestate: str, at_s: float | None) -> Span:
        # Offset of the wall clock at this moment: a process lives for months, and the host's clock is set now and then.
        # Within one tree of spans the offset stays the same.
        offset_ns = time.time_ns() - time.monotonic_ns()
        # An empty context, since the span that the caller's task happens to have is not the parent.
        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if traceparent:
            context = self._propagator.extract({"traceparent": traceparent, "tracestate": tracestate}, context)
        start_ns = None if at_s is None else _wall_ns(at_s, offset_ns)
        span = self._tracer.start_span(name, context, _KINDS[kind], start_time=start_ns)
        return _Recorded(self._tracer, span, offset_ns) if span.is_recording() else UNTRACED

    async def close(self) -> None:
        try:
            async with asyncio.timeout(self._flush_s):
                await asyncio.to_thread(self._provider.shutdown)
        except TimeoutError:
            _log.warning("spans were left when the process ended")
        sys.setswitchinterval(self._switch_s)


class _Recorded(Span):
    recorded = True

    def __init__(self, tracer: trace.Tracer, span: trace.Span, offset_ns: int) -> None:
        self._tracer = tracer
        self._span = span
        self._offset_ns = offset_ns

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    @property
    def log_fields(self) -> Mapping[str, str]:
        return {"trace_id": f"{self._span.get_span_context().trace_id:032x}"}

    def child(self, name: str, kind: Kind = "internal", *, at_s: float | None = None, link: Span | None = None) -> Span:
        links = [trace.Link(link._span.get_span_context())] if isinstance(link, _Recorded) else None
        span = self._tracer.start_span(
            name, trace.set_span_in_context(self._span), _KINDS[kind], links=links, start_time=self._ns(at_s)
        )
        return _Recorded(self._tracer, span, self._offset_ns)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        self._span.add_event(name, timestamp=self._ns(time.monotonic()))

    def fail(self, kind: str, text: str = "") -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(trace.StatusCode.ERROR, text or None)

    def end(self, at_s: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(self._ns(time.monotonic() if at_s is None else at_s))

    def _ns(self, at_s: float | None) -> int:
        return _wall_ns(time.monotonic() if at_s is None else at_s, self._offset_ns)


def _wall_ns(at_s: float, offset_ns: int) -> int:
    return int(at_s * 1e9) + offset_ns


class _Telling(SpanExporter):
    """Logs at most once a minute how many spans did not arrive. The exporting thread makes its calls, one at a time."""

    def __init__(self, exporter: SpanExporter, now: Callable[[], float] = time.monotonic) -> None:
        self._exporter = exporter
        self._now = now
        self._lost = 0
        self._told_s = float("-inf")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            return result
        self._lost += len(spans)
        now = self._now()
        if now >= self._told_s + _TELL_EVERY_S:
            _log.warning("traces: the collector (OTEL_EXPORTER_OTLP_ENDPOINT) does not take spans", lost=self._lost)
            self._told_s, self._lost = now, 0
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
