"""Traces: what a request's time went into, as OpenTelemetry spans. They are off unless `start` was called; then nothing
of OpenTelemetry is imported, and every span is UNTRACED, whose methods do nothing: callers need not check.

A tree of spans goes on in another process by its `traceparent` (W3C Trace Context), whose sampled flag holds for the
whole tree. Times are the callers' own, in seconds of time.monotonic, so that a span can be made when the work that it
describes is over.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from services.errors import Unavailable
from services.telemetry.spans import UNTRACED, Attributes, Kind, Span

_FLUSH_S = 3.0
"""The most seconds that a stop waits for spans that were not sent yet. A collector that is away must not keep a process
from ending."""


class Tracer(Protocol):
    """Makes spans, and exports them."""

    def begin(self, name: str, kind: Kind, traceparent: str, tracestate: str, at_s: float | None) -> Span: ...

    async def close(self) -> None: ...


_tracer: Tracer | None = None


def start(
    service: str, resource: Attributes | None = None, *, flush_s: float = _FLUSH_S
) -> Callable[[], Awaitable[None]]:
    """Has spans recorded and exported from now on, as `service`, with `resource` as attributes of all of them. Returns
    the coroutine function that ends this: it sends the spans that are left, in `flush_s` seconds at most. Raises
    Unavailable if OpenTelemetry is not installed."""
    global _tracer
    try:
        from services.telemetry import otlp
    except ImportError as error:
        raise Unavailable(f"traces: {error}; OpenTelemetry is among requirements/base.txt") from None
    tracer = _tracer = otlp.OtlpTracer(service, resource or {}, flush_s)

    async def close() -> None:
        global _tracer
        _tracer = None
        await tracer.close()

    return close


def on() -> bool:
    """Whether spans are recorded."""
    return _tracer is not None


def begin(
    name: str, kind: Kind = "internal", *, traceparent: str = "", tracestate: str = "", at_s: float | None = None
) -> Span:
    """The first span of a tree in this process: the child of `traceparent` if that is given and valid, else a new
    tree's root. UNTRACED if traces are off or the sampler leaves the tree out."""
    return UNTRACED if _tracer is None else _tracer.begin(name, kind, traceparent, tracestate, at_s)
