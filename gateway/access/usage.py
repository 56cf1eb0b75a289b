"""Tokens that each key used: metrics, and a file with a JSON line for each request, which billing can read."""

from __future__ import annotations

import asyncio
import os
import queue
import stat
import threading
import time
from dataclasses import asdict, dataclass

import orjson

from gateway import metrics
from services.telemetry import log

_log = log.get(__name__)
_MOST_WAITING = 10_000
"""Lines that wait to be written, some 3 MB of them: what a busy gateway adds in several seconds."""
_LAST_S = 5.0
"""Seconds that a stopping gateway waits for the last lines."""


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
    """The file. A thread writes it, so that nothing else waits for a slow disk. Each line is one write to the end of
    it, and the file is opened anew for each: it may be moved away at any time. A line that was cut, as on a full disk,
    is ended before the next. Where it cannot be written, is no regular file, or does not keep up, requests go on, and
    the log says so once."""

    def __init__(self, path: str, *, most_waiting: int = _MOST_WAITING) -> None:
        """`path` empty: no file. `most_waiting`: lines that may wait to be written; further ones are lost."""
        self._path = path
        self._failing = False
        self._lines: queue.Queue[bytes | None] = queue.Queue(most_waiting)
        self._writer = threading.Thread(target=self._write_all, name="usage", daemon=True)

    def add(self, key: str, usage: RequestUsage) -> None:
        """Counts the usage of a key; `key` empty: the gateway has no keys."""
        if key:
            for kind, count in (
                ("prompt", usage.prompt_tokens),
                ("cached", usage.cached_tokens),
                ("output", usage.output_tokens),
            ):
                metrics.KEY_TOKENS.labels(key, usage.model, kind).inc(count)
        if not self._path:
            return
        if not self._writer.ident:
            self._writer.start()
        try:
            self._lines.put_nowait(orjson.dumps({"time": round(time.time(), 3), "key": key, **asdict(usage)}) + b"\n")
        except queue.Full:
            self._lost(f"{self._lines.maxsize} lines wait to be written")

    async def close(self) -> None:
        """Returns when all lines are written, or when a disk has not taken them within some seconds. What is added
        later may not be written."""
        if self._writer.ident:
            await asyncio.to_thread(self._end)

    def _end(self) -> None:
        try:
            self._lines.put(None, timeout=_LAST_S)
        except queue.Full:
            pass
        else:
            self._writer.join(_LAST_S)
        if self._writer.is_alive():
            _log.error("usage is not written", file=self._path, why="its disk is too slow", lines=self._lines.qsize())

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)

    def _lost(self, why: str) -> None:
        metrics.USAGE_LOST.inc()
        if not self._failing:
            _log.error("usage is not written", file=self._path, why=why)
        self._failing = True

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
            self._lost(str(error))
        else:
            self._failing = False
