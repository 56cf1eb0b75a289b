"""Attributes of the gateway's spans. Names are OpenTelemetry's where there are any (HTTP, RPC, GenAI); `prism.` begins
those that are Prism's own. docs/operate/monitoring.md has the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.request import Request
from gateway.routing.routes import RoutePlace
from protos import common_pb2
from services.telemetry import tracing
from services.telemetry.spans import Span
from services.wording import enums

RPC = "prism.gateway.v1.Inference/Generate"
_LONGEST_NAME = 256


def of_http(path: str, headers: Mapping[str, str], arrival_s: float) -> Span:
    """The span of an HTTP request; it continues the trace of a sender that traces."""
    traceparent, tracestate = headers.get("traceparent", ""), headers.get("tracestate", "")
    span = tracing.begin(f"POST {path}", "server", traceparent=traceparent, tracestate=tracestate, at_s=arrival_s)
    if span.recorded:
        span.set({"http.request.method": "POST", "http.route": path, "url.path": path})
    return span


def of_rpc(metadata: Sequence[tuple[str, str | bytes]], arrival_s: float) -> Span:
    """The span of a call of `Generate`; it continues the trace of a sender that traces."""
    sent = {key: value for key, value in metadata if isinstance(value, str)}
    traceparent, tracestate = sent.get("traceparent", ""), sent.get("tracestate", "")
    span = tracing.begin(RPC, "server", traceparent=traceparent, tracestate=tracestate, at_s=arrival_s)
    if span.recorded:
        service, _, method = RPC.partition("/")
        span.set({"rpc.system": "grpc", "rpc.service": service, "rpc.method": method})
    return span


def asked(span: Span, request: Request, operation: str, *, streams: bool) -> None:
    """Adds what the client asks for; `operation` is a name of OpenTelemetry's GenAI conventions."""
    if not span.recorded:
        return
    sampling = request.sampling
    span.set(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "prism",
            "gen_ai.request.model": request.model[:_LONGEST_NAME],  # it was not checked that this model exists
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.choice.count": request.choices,
            "gen_ai.request.stream": streams,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p or 1.0,
        }
    )
    if sampling.max_new_tokens:
        span.set({"gen_ai.request.max_tokens": sampling.max_new_tokens})
    if sampling.HasField("seed"):
        span.set({"gen_ai.request.seed": sampling.seed})


def replied(span: Span, status: int) -> None:
    """Adds the HTTP status."""
    if span.recorded:
        span.set({"http.response.status_code": status})


def answered(
    span: Span,
    model: str,
    *,
    prompt_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    finish_reasons: Sequence[str],
    first_token_s: float,
) -> None:
    """Adds the outcome, as far as there is one. `first_token_s`: seconds since the arrival; 0: no token was sent."""
    span.set(
        {
            "gen_ai.response.model": model,
            "gen_ai.response.finish_reasons": finish_reasons,
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
        }
    )
    if first_token_s:
        span.set({"gen_ai.response.time_to_first_chunk": first_token_s})


def attempt(parent: Span, place: RoutePlace, *, number: int, model: str, resumed_tokens: int) -> Span:
    """The span of sending a request to a group for the `number`th time."""
    span = parent.child("attempt", "client")
    if span.recorded:
        span.set(
            {
                "gen_ai.request.model": model,
                "server.address": place.address,
                "prism.group": place.group,
                "prism.residency": residency(place.residency),
                "prism.attempt": number,
                "prism.resumed_tokens": resumed_tokens,
            }
        )
    return span


def residency(value: common_pb2.Residency) -> str:
    return enums.name(common_pb2.Residency, value)
