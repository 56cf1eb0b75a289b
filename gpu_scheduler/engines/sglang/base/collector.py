"""Python's collector stops a whole process, the longer the more objects it looks at: a step of everybody waits. What
SGLang and torch make while they are imported takes it 0.7 s on a GPU's host, and what a model is made of comes on top.
Neither changes while requests are served, so it looks at neither: `settle` puts out of its sight what there is.

    imports     paused, then `settle`
    a model     paused while it is built and proven, then `settle`. SGLang would collect four times as it captures
                graphs, and have the collector look at all of it from then on (`hooks_graphs.uncollected`)
    it leaves   `look_at_all`, which finds its cycles, then `settle`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.telemetry import log

_log = log.get(__name__)
_LONG_MS = 20.0
_began = 0.0


def pause() -> None:
    """Nothing is collected until `settle`, unless it is asked for."""
    gc.disable()


def settle() -> None:
    """What there is now is not looked at until `look_at_all`; what is made from now on is."""
    gc.freeze()
    gc.enable()


def look_at_all() -> None:
    """Collects, what was settled as well."""
    gc.unfreeze()
    gc.collect()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, nothing is collected unless it is asked for."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def say_pauses() -> None:
    """From now on every long pause is in the log (info)."""
    gc.callbacks.append(_heard)


def _heard(phase: str, info: dict[str, int]) -> None:
    global _began
    if phase == "start":
        _began = time.perf_counter()
    elif (ms := 1e3 * (time.perf_counter() - _began)) > _LONG_MS:
        _log.info("the collector stopped the engine", ms=round(ms, 1), generation=info["generation"])
