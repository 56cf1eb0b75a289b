"""The file of hourly traffic by model: JSON, replaced as a whole.

It is a help and nothing else: without it, placement begins as it does on its first day. So a file that is missing,
damaged or of another version is a line in the log and an empty history.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import orjson
import pydantic

from placement.policy.traffic import HOUR_S, TrafficCounts, TrafficHour
from services.telemetry import log

_log = log.get(__name__)
_VERSION = 1
_Count = Annotated[int, pydantic.Field(ge=0)]


class _Hour(pydantic.BaseModel):
    observed_s: Annotated[float, pydantic.Field(ge=0, le=HOUR_S)]
    models: dict[str, tuple[_Count, _Count, _Count, _Count]]
    """Name of a model -> its requests, prompt tokens, output tokens and returns."""


class _Document(pydantic.BaseModel):
    version: int
    hours: dict[_Count, _Hour]
    """Number of the hour since 1970 -> what was asked for in it."""


def read(path: str) -> dict[int, TrafficHour]:
    """The hours of the file; none, with a line in the log, if it cannot be used."""
    try:
        document = _Document.model_validate_json(Path(path).read_bytes())
    except FileNotFoundError:
        _log.info("no traffic of earlier hours is known: there is no file yet", file=path)
        return {}
    except OSError as error:
        _log.warning("no traffic of earlier hours is known", file=path, why=str(error))
        return {}
    except pydantic.ValidationError:
        _log.warning("no traffic of earlier hours is known: the file is damaged, and will be replaced", file=path)
        return {}
    if document.version != _VERSION:
        _log.warning(
            "no traffic of earlier hours is known: the file is of another version, and will be replaced",
            file=path,
            version=document.version,
        )
        return {}
    return {
        number: TrafficHour(hour.observed_s, {name: TrafficCounts(*counts) for name, counts in hour.models.items()})
        for number, hour in document.hours.items()
    }


def encoded(hours: dict[int, TrafficHour]) -> bytes:
    """The content of a file with these hours."""
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
