"""Domain errors, and the one table between them and gRPC status codes.

Code below the servers raises these and knows no transport; servers do not catch them, `services.rpc` translates. Three kinds of
failure have three fates: an error of a request is answered (here), a lost peer ends that connection, a broken invariant ends the process.
"""

from __future__ import annotations

import grpc


class PrismError(Exception):
    """A request that could not be served. `str(error)` is one line for the caller."""


class Invalid(PrismError):
    """The request makes no sense; sending it again cannot help."""


class NotFound(PrismError):
    """No such thing."""


class Exists(PrismError):
    """There is one already, and it differs."""


class Refused(PrismError):
    """There is not enough of something; the message has the arithmetic."""


class Unmet(PrismError):
    """The state does not allow it; it may after something else happened."""


class Conflict(PrismError):
    """Another change is under way, or got there first."""


class Unavailable(PrismError):
    """Who should answer is away; sending it again later can help."""


class TimedOut(PrismError):
    """It did not happen in time."""


_CODES: dict[type[PrismError], grpc.StatusCode] = {
    Invalid: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    Exists: grpc.StatusCode.ALREADY_EXISTS,
    Refused: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unmet: grpc.StatusCode.FAILED_PRECONDITION,
    Conflict: grpc.StatusCode.ABORTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_KINDS = {code: kind for kind, code in _CODES.items()}


def to_status(error: PrismError) -> tuple[grpc.StatusCode, str]:
    """The status that tells `error` to a caller."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind], str(error)
    return grpc.StatusCode.UNKNOWN, str(error)


def from_rpc(error: grpc.aio.AioRpcError) -> PrismError:
    """The domain error that a status tells; UNAVAILABLE for everything that has no kind of its own."""
    kind = _KINDS.get(error.code(), Unavailable)
    return kind(error.details() or error.code().name)
