"""Traces: CSV, perhaps gzipped, with the columns `arrival_s,model,prompt_tokens,output_tokens`, in order of time.

A bad line ends the reading with its number and its fault.
"""

from __future__ import annotations

import csv
import gzip
import io
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TextIO

from sim.inputs.catalogue import ModelSet, Spec
from sim.inputs.request import SimulatedRequest

COLUMNS = ["arrival_s", "model", "prompt_tokens", "output_tokens"]
ENCODING = "utf-8-sig"
"""Encoding of CSV files. Spreadsheets write a byte order mark before the first column."""
MOST = 10**9
"""Most tokens of a request, or requests a second: above it a number is a mistake, and arithmetic overflows."""
MOST_REQUESTS = 10**7
"""Most requests of a workload: more would fill the memory of the machine that simulates them."""
LATEST_S = 1e11
"""Latest arrival in seconds since 1970, some 3,000 years from now: clocks that show more count milliseconds."""
LONGEST_S = 10 * 365 * 86400.0
"""Most seconds from a trace's first request to its last: times that take longer are not seconds."""


class TraceError(ValueError):
    """A fault in a trace, with its line."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a trace that is replayed."""

    start_s: float = 0.0
    seconds: float = inf
    rate: float = 1.0
    """Requests for each one of the trace: below 1 some are left out, above 1 some come more than once, by a seeded
    draw."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (isfinite(self.rate) and self.rate > 0):
            raise TraceError(f"the rate has to be above zero, not {self.rate:g}")
        if not self.start_s >= 0 or not self.seconds > 0:
            raise TraceError(f"no slice: it begins at {self.start_s:g} s and lasts {self.seconds:g} s")


@dataclass(slots=True)
class Workload:
    """The requests of a slice; times count from its start."""

    requests: list[SimulatedRequest]
    seconds: float
    clipped: int = 0
    """Number of requests that were longer than their model's context."""


def read(path: Path, catalogue: ModelSet, part: Slice) -> Workload:
    """The slice of a trace file. The whole file is checked, not the slice alone. Raises TraceError, OSError."""
    draw = random.Random(part.seed)
    trace = Workload([], part.seconds)
    last = 0.0
    for where, arrival, model, prompt, output in rows(path):
        last = arrival
        spec = listed(model, catalogue, where)
        if not part.start_s <= arrival < part.start_s + part.seconds:
            continue
        if prompt + output > spec.context_tokens:
            trace.clipped += 1
            prompt = min(prompt, spec.context_tokens - 1)
            output = min(output, spec.context_tokens - prompt)
        copies = int(part.rate) + (draw.random() < part.rate % 1)
        if len(trace.requests) + copies > MOST_REQUESTS:
            raise TraceError(
                f"{where}: more than {MOST_REQUESTS:,} requests at rate {part.rate:g}: take a shorter part"
            )
        for _ in range(copies):
            trace.requests.append(
                SimulatedRequest(
                    str(len(trace.requests)),
                    spec.name,
                    arrival - part.start_s,
                    prompt,
                    output,
                    spec.ttft_s,
                    spec.tpot_s,
                )
            )
    if not trace.requests:
        raise TraceError(f"{path}: no request in this slice; the last of the file is at {last:g} s")
    if part.seconds == inf:
        trace.seconds = max(last - part.start_s, 1e-3)
    return trace


def rows(path: Path) -> Iterator[tuple[str, float, str, int, int]]:
    """The rows of a trace file, each as its place in words, its arrival in seconds, model, prompt tokens and output
    tokens. Raises TraceError, OSError."""
    first, last = inf, 0.0
    for where, row in rows_of(path, COLUMNS):
        arrival = _number(row[0], where, "arrival_s")
        first = min(first, arrival)
        if arrival > LATEST_S:
            raise TraceError(f"{where}: arrival_s is {arrival:,.0f}, over {LATEST_S:,.0f}: is it milliseconds?")
        if arrival < last:
            raise TraceError(f"{where}: time goes back, from {last:g} to {arrival:g} s")
        if arrival - first > LONGEST_S:
            raise TraceError(
                f"{where}: arrival_s is {arrival - first:g} s after the first, over ten years: is it seconds?"
            )
        last = arrival
        if not row[1]:
            raise TraceError(f"{where}: model is empty")
        yield where, arrival, row[1], _count(row[2], where, COLUMNS[2]), _count(row[3], where, COLUMNS[3])


def begins(path: Path) -> float:
    """Arrival in seconds of the first request of a trace file, 0 if it has none. Raises TraceError, OSError."""
    return next((arrival for _, arrival, *_ in rows(path)), 0.0)


def rows_of(path: Path, columns: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The rows of a CSV file with these columns, perhaps gzipped, each with its place in words. Raises TraceError,
    OSError."""
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    opened = gzip.open(path, "rb") if zipped else open(path, "rb")
    with opened as file:
        yield from _rows(path, io.TextIOWrapper(file, encoding=ENCODING, newline=""), columns)


def _rows(path: Path, file: TextIO, columns: list[str]) -> Iterator[tuple[str, list[str]]]:
    rows = csv.reader(file)
    try:
        header = next(rows, [])
        if not header:
            raise TraceError(f"{path}: it is empty, or begins with an empty line, instead of {','.join(columns)!r}")
        if header != columns:
            raise TraceError(f"{path}, line 1: the columns are {','.join(header)!r}, not {','.join(columns)!r}")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(columns):
                raise TraceError(f"{where}: {len(row)} columns instead of {len(columns)}")
            yield where, row
    except UnicodeDecodeError:
        # It is read in pieces: in which line the error is, is not known.
        raise TraceError(f"{path}: it is no text file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error, csv.Error) as error:
        raise TraceError(f"{path}, after line {rows.line_num}: {error}") from None


def listed(name: str, catalogue: ModelSet, where: str) -> Spec:
    """The model of this name. Raises TraceError."""
    spec = catalogue.find(name)
    if spec is None:
        raise TraceError(f"{where}: model {name!r} is not in the catalogue")
    return spec


def _number(text: str, where: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{where}: {column} is {text!r}, not a number") from None
    if not isfinite(value) or value < 0:
        raise TraceError(f"{where}: {column} is {text}")
    return value


def _count(text: str, where: str, column: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise TraceError(f"{where}: {column} is {text!r}, not a whole number") from None
    if value <= 0:
        raise TraceError(f"{where}: {column} is {value}; it has to be above zero")
    if value > MOST:
        raise TraceError(f"{where}: {column} is above {MOST:,}")
    return value
