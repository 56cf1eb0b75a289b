"""Processes that run points of the simulator, forked from this one, at low priority."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ProcessPoolExecutor


def pool(workers: int) -> ProcessPoolExecutor:
    """So many processes. What was thrown away here is collected before they are forked, and never by them: gRPC's
    objects wait for their threads when they go, and a fork has none."""
    gc.collect()
    return ProcessPoolExecutor(workers, initializer=_begin)


def _begin() -> None:
    gc.freeze()
    os.nice(10)
