"""Processes that run points of the simulator, forked from this one, at low priority."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

What = TypeVar("What")
Found = TypeVar("Found")


def pool(workers: int) -> ProcessPoolExecutor:
    """So many processes. What was thrown away here is collected before they are forked, and never by them: gRPC's
    objects wait for their threads when they go, and a fork has none."""
    gc.collect()
    return ProcessPoolExecutor(workers, initializer=_begin)


def results(processes: ProcessPoolExecutor, running: Mapping[Future[Found], What]) -> Iterator[tuple[What, Found]]:
    """What each was for and came to, in the order in which they end. Where one fails the others are not waited for:
    raises what it raised, with what it was for."""
    for future in as_completed(running):
        try:
            found = future.result()
        except Exception as error:
            processes.shutdown(wait=False, cancel_futures=True)
            error.add_note(f"in {running[future]}")
            raise
        yield running[future], found


def _begin() -> None:
    gc.freeze()
    os.nice(10)
