"""The one table between domain errors and gRPC status codes, both ways."""

from __future__ import annotations

import grpc

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

_CODES: dict[type[PrismError], grpc.StatusCode] = {
    Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    Unknown: grpc.StatusCode.UNAUTHENTICATED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Exists: grpc.StatusCode.ALREADY_EXISTS,
    Refused: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unmet: grpc.StatusCode.FAILED_PRECONDITION,
    Conflict: grpc.StatusCode.ABORTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_NO_ANSWER = "Deadline Exceeded"
"""What gRPC itself says when there was no answer; a server that gives up in time has a sentence of its own."""
_NOT_REACHED = ("failed to connect", "Socket closed", "Cancelling all calls", "Connection reset", "GOAWAY", "recvmsg")
"""Beginnings of what gRPC itself says when a service cannot be reached."""
_KINDS = {code: kind for kind, code in _CODES.items()}


def to_status(error: PrismError) -> tuple[grpc.StatusCode, str]:
    """The status code and text with which a caller gets `error`."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind], str(error)
    return grpc.StatusCode.UNAVAILABLE, str(error)  # the reverse of what `from_rpc` does


def from_rpc(error: grpc.aio.AioRpcError, whom: str = "") -> PrismError:
    """The domain error of a status; Unavailable for every code that has no kind of its own. `whom`: name of the called
    service, for a call whose time was over before there was an answer, or that did not reach it: gRPC's own text
    names no service then, or its address."""
    kind = _KINDS.get(error.code(), Unavailable)
    told = error.details() or error.code().name
    if whom and kind is TimedOut and _NO_ANSWER in told:
        return TimedOut(f"{whom} did not answer in time")
    if whom and kind is Unavailable and told.startswith(_NOT_REACHED):
        return Unavailable(f"{whom} is away")
    return kind(told)
