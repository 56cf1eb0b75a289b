"""Tokens that each key used: metrics, and a file with a JSON line for each request, which billing can read."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import asdict, dataclass

import orjson

from gateway import metrics
from services.telemetry import log

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The counts of one request that was taken, whichever way it ended."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    """Number of the prompts' tokens whose KV was cached."""
    output_tokens: int
    """Number of tokens that were made, those of a matched stop string included."""
    reasoning_tokens: int
    """Number of the output's tokens that are reasoning."""
    finish_reasons: tuple[str, ...]
    """How each answer ended: a finish reason of OpenAI's, or "cancelled"."""


class UsageLog:
    """The file. Each line is one write to the end of it, and the file is opened anew for each: it may be moved away at
    any time. A line that was cut, as on a full disk, is ended before the next. Where it cannot be written, or is no
    regular file, requests go on, and the log says so once."""

    def __init__(self, path: str) -> None:
        """`path` empty: no file."""
        self._path = path
        self._failing = False

    def add(self, key: str, usage: RequestUsage) -> None:
        """Counts the usage of a key; `key` empty: the gateway has no keys."""
        if key:
            for kind, count in (
                ("prompt", usage.prompt_tokens),
                ("cached", usage.cached_tokens),
                ("output", usage.output_tokens),
            ):
                metrics.KEY_TOKENS.labels(key, usage.model, kind).inc(count)
        if self._path:
            self._write(orjson.dumps({"time": round(time.time(), 3), "key": key, **asdict(usage)}) + b"\n")

    def _write(self, line: bytes) -> None:
        try:
            # Without O_NONBLOCK a FIFO, which is no place for usage, would have the gateway wait for its reader.
            file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o640)
            try:
                state = os.fstat(file)
                if not stat.S_ISREG(state.st_mode):
                    raise OSError("it is no regular file")
                if state.st_size and os.pread(file, 1, state.st_size - 1) != b"\n":
                    line = b"\n" + line
                written = os.write(file, line)
            finally:
                os.close(file)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were written")
        except OSError as error:
            metrics.USAGE_LOST.inc()
            if not self._failing:
                _log.error("usage is not written", file=self._path, why=str(error))
            self._failing = True
        else:
            self._failing = False
