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
    """Nobody knows who asks."""


class Forbidden(PrismError):
    """Not for who asks."""


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
