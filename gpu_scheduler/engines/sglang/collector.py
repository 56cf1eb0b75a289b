"""Python's collector stops a whole process, the longer the more objects it looks at: a step of everybody waits."""

from __future__ import annotations

import gc
import time

from services import log

_log = log.get(__name__)
_LONG_MS = 20.0
_began = 0.0


def say_pauses() -> None:
    """From now on every long pause is in the log (info)."""
    gc.callbacks.append(_heard)


def _heard(phase: str, info: dict[str, int]) -> None:
    global _began
    if phase == "start":
        _began = time.perf_counter()
    elif (ms := 1e3 * (time.perf_counter() - _began)) > _LONG_MS:
        _log.info("the collector stopped the engine", ms=round(ms, 1), generation=info["generation"])
