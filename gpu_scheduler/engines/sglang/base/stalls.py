"""Where an engine stands still, for whoever looks for it: with the option `stall_trace_ms`, every thread's stack is
written to its log when it neither waits for an event nor begins another step for so long.

By a thread of the C runtime, which needs no lock of Python's: a driver call that keeps it shows too.
"""

from __future__ import annotations

import faulthandler

_limit_s = 0.0


def trace(limit_ms: int) -> None:
    """From now on; 0: no more. Costs a step some 0.1 ms."""
    global _limit_s
    _limit_s = limit_ms / 1e3
    faulthandler.cancel_dump_traceback_later()


def at_work() -> None:
    """A step begins, or what was waited for has come."""
    if _limit_s:
        faulthandler.dump_traceback_later(_limit_s)


def at_rest() -> None:
    """It waits for an event."""
    if _limit_s:
        faulthandler.cancel_dump_traceback_later()
