"""The file of hourly traffic by model, and of models whose places were chosen by it: JSON, replaced as a whole.

The file is a help and nothing else: without it, placement begins as it does on its first day. A file that is missing,
damaged or of another version is therefore a line in the log and an empty history. A file that is there and cannot be
read may be whole, and is an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import orjson
import pydantic

from placement.policy.traffic import HOUR_S, TrafficCounts, TrafficHour
from services.telemetry import log

_log = log.get(__name__)
_VERSION = 1
_Count = Annotated[int, pydantic.Field(ge=0, lt=1 << 53)]


class _Version(pydantic.BaseModel):
    version: int


class _Hour(pydantic.BaseModel):
    observed_s: Annotated[float, pydantic.Field(ge=0, le=HOUR_S)]
    models: dict[str, tuple[_Count, _Count, _Count, _Count]]
    """Name of a model -> its requests, prompt tokens, output tokens and returns."""


class _Document(_Version):
    hours: dict[_Count, _Hour]
    """Number of the hour since 1970 -> what was asked for in it."""
    settled: list[str] = []
    """Models whose places need no correction (`TrafficRecord.settled`)."""


def read(path: str) -> tuple[dict[int, TrafficHour], frozenset[str]]:
    """The hours of the file, and the settled models; none, with a line in the log, if it cannot be used. Raises OSError
    if it is there and cannot be read."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        _log.info("no traffic of earlier hours is known: there is no file yet", file=path)
        return {}, frozenset()
    try:
        version = _Version.model_validate_json(content).version
        if version != _VERSION:
            _log.warning(
                "no traffic of earlier hours is known: the file is of another version, and will be replaced",
                file=path,
                version=version,
            )
            return {}, frozenset()
        document = _Document.model_validate_json(content)
    except pydantic.ValidationError:
        _log.warning("no traffic of earlier hours is known: the file is damaged, and will be replaced", file=path)
        return {}, frozenset()
    hours = {
        number: TrafficHour(hour.observed_s, {name: TrafficCounts(*counts) for name, counts in hour.models.items()})
        for number, hour in document.hours.items()
    }
    return hours, frozenset(document.settled)


def encoded(hours: dict[int, TrafficHour], settled: Collection[str] = ()) -> bytes:
    """The content of a file with these hours and settled models."""
    document = {
        "version": _VERSION,
        "hours": {
            str(number): {
                "observed_s": hour.observed_s,
                "models": {
                    name: [counts.requests, counts.prompt_tokens, counts.output_tokens, counts.returns]
                    for name, counts in hour.models.items()
                },
            }
            for number, hour in hours.items()
        },
        "settled": sorted(settled),
    }
    return orjson.dumps(document)


def write(path: str, content: bytes) -> None:
    """Replaces the file, so that at any time it is the old one or the new one. Raises OSError."""
    beside = f"{path}.new"
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
