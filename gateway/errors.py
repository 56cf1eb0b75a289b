"""What can become of a request, beside an answer, and how OpenAI's API says it.

The kinds extend the chassis' domain errors, so that gRPC clients get a status by the same table as everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from services.errors import Conflict, Exists, Invalid, NotFound, PrismError, Refused, TimedOut, Unavailable, Unmet


class BadField(Invalid):
    """A field of the request is wrong."""

    def __init__(self, message: str, field: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class UnknownModel(NotFound):
    """Not in the catalogue."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' does not exist.")


class TooMany(Refused):
    """More requests in flight than this gateway takes."""


class ModelFaulty(Unavailable):
    """The model is in state error; others serve on."""


class NotUp(Unavailable):
    """The model could not be brought up in the time that a request may wait."""


class Denied(Unmet):
    """Not for who asks."""


class Late(Unavailable):
    """It would have missed its target, and its client asked to have it dropped then."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How one kind of error looks over HTTP."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


_SHAPES: dict[type[PrismError], Shape] = {
    BadField: Shape(400, "invalid_request_error", None),
    Invalid: Shape(400, "invalid_request_error", "invalid_value"),
    UnknownModel: Shape(404, "invalid_request_error", "model_not_found"),
    NotFound: Shape(404, "invalid_request_error", "not_found"),
    Denied: Shape(403, "permission_error", "denied"),
    TooMany: Shape(429, "rate_limit_error", "too_many_in_flight", 1),
    Refused: Shape(503, "service_unavailable_error", "no_room", 5),
    ModelFaulty: Shape(503, "service_unavailable_error", "model_error"),
    NotUp: Shape(503, "service_unavailable_error", "model_not_ready", 5),
    Late: Shape(503, "service_unavailable_error", "slo_ttft_missed", 1),
    TimedOut: Shape(504, "service_unavailable_error", "time_out"),
    Unavailable: Shape(503, "service_unavailable_error", "unavailable", 1),
    Unmet: Shape(503, "service_unavailable_error", "not_now", 5),
    Conflict: Shape(503, "service_unavailable_error", "not_now", 1),
    Exists: Shape(409, "invalid_request_error", "exists"),
}


def shape(error: PrismError) -> Shape:
    """The nearest kind's shape."""
    for kind in type(error).__mro__:
        if kind in _SHAPES:
            return _SHAPES[kind]
    return Shape(500, "server_error", None)


def body(error: PrismError) -> dict[str, Any]:
    """The error as OpenAI's JSON object."""
    looks = shape(error)
    code = error.code if isinstance(error, BadField) else looks.code
    field = error.field if isinstance(error, BadField) else "model" if isinstance(error, UnknownModel) else None
    return envelope(str(error), looks.type, code, field)


def envelope(message: str, kind: str, code: str | None, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def encode(error: PrismError) -> bytes:
    return orjson.dumps(body(error))
