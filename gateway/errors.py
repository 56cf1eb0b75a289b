"""The errors that a request can end with, and their form in OpenAI's API.

The kinds extend the chassis' domain errors, so that gRPC clients get a status by the same table as everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import orjson

from services.errors import (
    Conflict,
    Exists,
    Forbidden,
    Invalid,
    NotFound,
    PrismError,
    Refused,
    TimedOut,
    Unavailable,
    Unknown,
    Unmet,
)

Headers = list[tuple[bytes, bytes]]


class BadField(Invalid):
    """A field of the request is wrong."""

    def __init__(self, message: str, field: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class BodyTooLarge(BadField):
    """The body is larger than this gateway takes."""


class OtherEncoding(BadField):
    """The body is in an encoding that this gateway cannot unpack."""


class TooSlow(Invalid):
    """The body did not arrive in time."""


class NoRoomForBody(Refused):
    """Other requests' bodies that are still arriving take all the room."""


class UnknownModel(NotFound):
    """The model is not in the catalogue."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model '{model}' does not exist.")


class TooMany(Refused):
    """More requests in flight than this gateway takes."""


class ModelFaulty(Unavailable):
    """The model is in state error; others go on serving. `retry_s`: seconds within which it is tried again, since the
    error may pass; 0: repeating the request cannot help before an operator has fixed it."""

    def __init__(self, message: str, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class NotUp(Unavailable):
    """The model could not be brought up in the time that a request may wait. `retry_s`: seconds after which it may be
    worth repeating the request; 0: soon."""

    def __init__(self, message: str, retry_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class NotPossible(Unmet):
    """What an admin asked for cannot be done as things are."""


class NoKey(Unknown):
    """The request has no key, or an unknown one. `scheme`: authentication scheme in which a key is asked for."""

    def __init__(self, message: str, scheme: str = "Bearer") -> None:
        super().__init__(message)
        self.scheme = scheme


class Denied(Forbidden):
    """The caller may not do this."""


class OverLimit(Refused):
    """The request exceeds what its key may use in a minute."""

    def __init__(self, message: str, kind: str, headers: Headers, retry_after_s: int | None) -> None:
        """`kind` is "requests" or "tokens". `retry_after_s` in seconds; None: repeating the request cannot help."""
        super().__init__(message)
        self.kind = kind
        self.headers = headers
        self.retry_after_s = retry_after_s


class Late(Unavailable):
    """The answer would have missed its target, and the client asked to have the request dropped then."""


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """The form of one kind of error over HTTP."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


_SHAPES: dict[type[PrismError], ErrorShape] = {
    BodyTooLarge: ErrorShape(413, "invalid_request_error", None),
    OtherEncoding: ErrorShape(415, "invalid_request_error", None),
    TooSlow: ErrorShape(408, "invalid_request_error", "request_time_out"),
    BadField: ErrorShape(400, "invalid_request_error", None),
    Invalid: ErrorShape(400, "invalid_request_error", "invalid_value"),
    UnknownModel: ErrorShape(404, "invalid_request_error", "model_not_found"),
    NotFound: ErrorShape(404, "invalid_request_error", "not_found"),
    Unknown: ErrorShape(401, "invalid_request_error", "invalid_api_key"),
    Forbidden: ErrorShape(403, "permission_error", "denied"),
    OverLimit: ErrorShape(429, "rate_limit_error", "rate_limit_exceeded"),
    TooMany: ErrorShape(429, "rate_limit_error", "too_many_in_flight", 1),
    NoRoomForBody: ErrorShape(503, "service_unavailable_error", "no_room", 1),
    Refused: ErrorShape(503, "service_unavailable_error", "no_room", 5),
    ModelFaulty: ErrorShape(503, "service_unavailable_error", "model_error"),
    NotUp: ErrorShape(503, "service_unavailable_error", "model_not_ready", 5),
    Late: ErrorShape(503, "service_unavailable_error", "slo_ttft_missed", 1),
    TimedOut: ErrorShape(504, "service_unavailable_error", "time_out"),
    Unavailable: ErrorShape(503, "service_unavailable_error", "unavailable", 1),
    NotPossible: ErrorShape(409, "invalid_request_error", "not_possible"),
    Unmet: ErrorShape(503, "service_unavailable_error", "not_now", 5),
    Conflict: ErrorShape(503, "service_unavailable_error", "not_now", 1),
    Exists: ErrorShape(409, "invalid_request_error", "exists"),
}


def shape(error: PrismError) -> ErrorShape:
    """The form of the error's nearest kind."""
    for kind in type(error).__mro__:
        if kind in _SHAPES:
            return _SHAPES[kind]
    return ErrorShape(500, "server_error", None)


def code(error: PrismError) -> str:
    """The error's `code`; empty if it has none."""
    return error.code if isinstance(error, BadField) else shape(error).code or ""


def body(error: PrismError) -> dict[str, Any]:
    """The error as OpenAI's JSON object."""
    looks = shape(error)
    field = error.field if isinstance(error, BadField) else "model" if isinstance(error, UnknownModel) else None
    kind = error.kind if isinstance(error, OverLimit) else looks.type
    return envelope(str(error), kind, code(error) or None, field)


def headers(error: PrismError) -> Headers:
    """Headers of a response with the error."""
    if isinstance(error, NoKey):
        return [(b"www-authenticate", f'{error.scheme} realm="prism"'.encode())]
    if isinstance(error, OverLimit):
        again = error.retry_after_s
        # OpenAI's clients repeat a request after a 429, unless they are told not to.
        return [*error.headers, (b"x-should-retry", b"false") if again is None else (b"retry-after", b"%d" % again)]
    if isinstance(error, OtherEncoding):
        return [(b"accept-encoding", b"gzip, deflate")]
    # The rest of a body that was not read to its end is no next request.
    closed = [(b"connection", b"close")] if isinstance(error, (BodyTooLarge, TooSlow, NoRoomForBody)) else []
    again = shape(error).retry_after_s
    if isinstance(error, (ModelFaulty, NotUp)) and error.retry_s:
        again = math.ceil(error.retry_s)
    return closed if again is None else [*closed, (b"retry-after", b"%d" % again)]


def envelope(message: str, kind: str, code: str | None, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def encode(error: PrismError) -> bytes:
    return orjson.dumps(body(error))
