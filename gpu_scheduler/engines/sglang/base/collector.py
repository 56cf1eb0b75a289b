"""Python's garbage collector stops the whole process, the longer the more objects it looks at, and every request waits
for the step that it interrupts. The objects that SGLang and torch make while they are imported, nearly a million, take
it 0.7 s on a GPU's host. They do not change, so the collector is kept from looking at them: `settle` freezes all
objects that exist.

    imports       collection is paused, then `settle`
    a model       collection is paused while it is built and proven, then `settle_model`. SGLang would collect four
                  times as it captures graphs, and have the collector look at everything from then on
                  (`hooks/graphs.py`)
    it leaves     `look_at_model` finds its reference cycles, then `settle`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.telemetry import log

_log = log.get(__name__)
_LONG_MS = 20.0
_MANY = 50_000
"""Objects that the collector takes some 5 ms for. A model of 30 layers has 6,000."""
_frozen_too = False
"""Whether the objects of the model that is here are frozen."""
_began = 0.0


def pause() -> None:
    """Stops automatic collection until the next `settle` or `settle_model`; an explicit `gc.collect()` still works."""
    gc.disable()


def settle() -> None:
    """Freezes the objects that exist now and turns automatic collection on for those made later."""
    global _frozen_too
    _frozen_too = False
    gc.freeze()
    gc.enable()


def settle_model() -> None:
    """Turns automatic collection on for a model that serves. Its objects are frozen only if there are many, because
    libraries were imported for it."""
    global _frozen_too
    if len(gc.get_objects()) > _MANY:
        _frozen_too = True
        gc.freeze()
    gc.enable()


def look_at_model() -> None:
    """Collects over all objects of a model that has left; over those of imports too if the model's are frozen."""
    if _frozen_too:
        gc.unfreeze()
    gc.collect()


@contextmanager
def paused() -> Iterator[None]:
    """Stops automatic collection inside the `with` block; an explicit `gc.collect()` still works."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def say_pauses() -> None:
    """Logs (info) every collector pause above 20 ms from now on."""
    gc.callbacks.append(_heard)


def _heard(phase: str, info: dict[str, int]) -> None:
    global _began
    if phase == "start":
        _began = time.perf_counter()
    elif (ms := 1e3 * (time.perf_counter() - _began)) > _LONG_MS:
        _log.info("the collector stopped the engine", ms=round(ms, 1), generation=info["generation"])
