"""Domain errors. Code below the servers raises these and knows no transport; `services.rpc.status` has the table to
gRPC.

Servers do not catch them: `services.rpc.rpc` translates. Three kinds of failure have three fates: an error of a request
is answered (these), a lost peer ends that connection, a broken invariant ends the process.
"""

from __future__ import annotations


class PrismError(Exception):
    """A request that could not be served. `str(error)` is one line for the caller."""


class Invalid(PrismError):
    """The request makes no sense; sending it again cannot help."""


class Unknown(PrismError):
    """It is not known who makes the request."""


class Forbidden(PrismError):
    """The caller may not do this."""


class NotFound(PrismError):
    """There is no such thing."""


class Exists(PrismError):
    """There is a thing of that name already, and it differs."""


class Refused(PrismError):
    """There is not enough of some resource; the message has the arithmetic."""


class Unmet(PrismError):
    """The present state does not allow the request; a later one may."""


class Conflict(PrismError):
    """Another change is under way, or came first."""


class Unavailable(PrismError):
    """The service that should answer is away; sending the request again later can help."""


class TimedOut(PrismError):
    """The operation did not finish in time."""


def first_of_chain(error: BaseException) -> BaseException:
    """The first exception of the chain: the one that was raised while no other was being handled."""
    seen = {id(error)}
    while (before := error.__cause__ or error.__context__) is not None and id(before) not in seen:
        seen.add(id(before))
        error = before
    return error
