"""Traces of an engine that stands still: with the option `stall_trace_ms`, every thread's stack is written to its log
when the engine has neither waited for an event nor begun another step for that long.

A thread of the C runtime writes them; it needs no lock of Python's, so a driver call that keeps the lock shows too.
"""

from __future__ import annotations

import faulthandler

_limit_s = 0.0


def trace(limit_ms: int) -> None:
    """Turns tracing on for stalls of `limit_ms` milliseconds from now on; 0 turns it off. It costs a step some 0.1
    ms."""
    global _limit_s
    _limit_s = limit_ms / 1e3
    faulthandler.cancel_dump_traceback_later()


def at_work() -> None:
    """Starts the timer: a step begins, or the event that was waited for has come."""
    if _limit_s:
        faulthandler.dump_traceback_later(_limit_s)


def at_rest() -> None:
    """Stops the timer: the engine waits for an event."""
    if _limit_s:
        faulthandler.cancel_dump_traceback_later()
