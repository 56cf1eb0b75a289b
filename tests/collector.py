"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2

Spans = list["SpanSeen"]


@dataclass(frozen=True)
class SpanSeen:
    """One that arrived; ids in hexadecimal digits, `parent` empty for a root."""

    service: str
    resource: dict[str, Any]
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[str, ...]
    links: tuple[tuple[str, str], ...]
    """(trace, id) of each."""
    failed: bool


class Collector:
    """`with Collector() as it:` listens on a free port of the loopback address."""

    def __init__(self) -> None:
        self._spans: Spans = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """From now on nobody listens."""
        self._server.shutdown()
        self._server.server_close()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            self._spans += _decode(request)
            self._changed.notify_all()

    @property
    def spans(self) -> Spans:
        """All that have come."""
        with self._changed:
            return list(self._spans)

    def trace(self, trace: str) -> Spans:
        """Those of one trace."""
        return [span for span in self.spans if span.trace == trace]

    async def until(self, condition: Callable[[Spans], Any], timeout_s: float = 120.0) -> Any:
        """Waits until `condition` holds of all that have come; what it returned."""

        def wait() -> Any:
            with self._changed:
                return self._changed.wait_for(lambda: condition(list(self._spans)), timeout_s)

        found = await asyncio.to_thread(wait)
        assert found, [(span.service, span.name) for span in self.spans]
        return found


def _decode(request: ExportTraceServiceRequest) -> Spans:
    return [
        SpanSeen(
            service=resource["service.name"],
            resource=resource,
            name=span.name,
            kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
            trace=span.trace_id.hex(),
            id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_values(span.attributes),
            events=tuple(event.name for event in span.events),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        )
        for of_resource in request.resource_spans
        for resource in [_values(of_resource.resource.attributes)]
        for scope in of_resource.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        return (
            [value(one) for one in any_value.array_value.values] if kind == "array_value" else getattr(any_value, kind)
        )

    return {attribute.key: value(attribute.value) for attribute in attributes}
