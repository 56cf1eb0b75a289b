"""Values that are read from files and follow them while the process runs: keys, certificates.

A change is a file with another identity, size or time. The last value stays while the new files cannot be used, or are
still being written. Files are looked at once a second (`follow`), whatever file system they are on: a mounted Secret
changes by a link, and inotify would not report that for the file behind it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from services.errors import Invalid
from services.telemetry import log

T = TypeVar("T")
_log = log.get(__name__)
_LOOK_S = 1.0
_Stamps = tuple[tuple[int, ...] | None, ...]


class Followed(Generic[T]):
    """The last good value that `read` made of `paths`. `read` raises OSError, or ValueError with one line."""

    def __init__(self, what: str, paths: Sequence[str], read: Callable[[], T]) -> None:
        """`what`: what the files are, for the log. Raises Invalid with one line if they cannot be used."""
        self._what = what
        self._paths = paths
        self._read = read
        self._seen = _stamps(paths)
        self.revision = 0
        """Rises with every change of `value`."""
        try:
            self.value = read()
        except (OSError, ValueError) as error:
            raise Invalid(_line(error)) from None
        self._changed: list[Callable[[T], None]] = []

    def on_change(self, tell: Callable[[T], None]) -> None:
        """Has `tell` called with every later value."""
        self._changed.append(tell)

    def refresh(self) -> bool:
        """Reads the files if they have changed. Returns whether there is a new value. Files that cannot be used are
        logged once, in one line, and change nothing."""
        stamps = _stamps(self._paths)
        if stamps == self._seen:
            return False
        try:
            value = self._read()
        except (OSError, ValueError) as error:
            self._seen = stamps
            _log.error("new file refused, the old one holds", what=self._what, why=_line(error))
            return False
        if _stamps(self._paths) != stamps:
            return False  # written meanwhile, so it is of no one moment: the next look reads it
        self._seen, self.value = stamps, value
        self.revision += 1
        _log.info("read again", what=self._what, files=list(self._paths))
        for tell in self._changed:
            tell(value)
        return True


async def follow(followed: Sequence[Followed[Any]], hurry: asyncio.Event) -> None:
    """Keeps the values fresh, for ever: once a second, and at once when `hurry` is set."""
    while True:
        try:
            async with asyncio.timeout(_LOOK_S):
                await hurry.wait()
        except TimeoutError:
            pass
        hurry.clear()
        for each in followed:
            each.refresh()


def _stamps(paths: Sequence[str]) -> _Stamps:
    """Stamps that differ between two states of the files; None for a file that cannot be looked at."""
    stamps: list[tuple[int, ...] | None] = []
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            stamps.append(None)
        else:
            stamps.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))
    return tuple(stamps)


def _line(error: OSError | ValueError) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
