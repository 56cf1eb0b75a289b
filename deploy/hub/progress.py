"""Progress of a download: the library's bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

_BYTES_WRITTEN = "huggingface_hub.snapshot_download"
"""The library's name of the one bar that counts bytes on disk."""
_EVERY_S = 10.0
_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000 as the hub shows them: "1.5 GB"."""
    number, unit = float(nbytes), 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 or number >= 99.95 else f"{number:.1f} {_UNITS[unit]}"


def bar_of(total_bytes: int, say: Callable[[str], None]) -> type:
    """A class of bars for a download of so many bytes, of which one is shown."""

    class _Bar(tqdm):  # type: ignore[misc]
        total = property(lambda self: total_bytes, lambda self, value: None)
        """The library learns sizes file by file; here they are known."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            shown = kwargs.get("name") == _BYTES_WRITTEN
            if not shown:
                kwargs["disable"] = True
            kwargs["bar_format"] = "prism: {percentage:3.0f}% |{bar:32}| {n_fmt}B of {total_fmt}B {postfix}"
            super().__init__(*args, **kwargs)
            self._lines = Lines(total_bytes, say) if shown and self.disable else None

        def update(self, n: float | None = 1) -> Any:
            if self._lines is not None:
                self._lines.add(int(n or 0))
            return super().update(n)

    return _Bar


class Lines:
    """Tells how far a download is where there is no terminal. Threads may share it."""

    def __init__(self, total_bytes: int, say: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> None:
        self._total = total_bytes
        self._say = say
        self._now = now
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._told = now()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = self._now()
            if now - self._told < _EVERY_S:
                return
            self._told = now
            rate = self._done / (now - self._began)
            self._say(f"{size(self._done)} of {size(self._total)}, {size(rate)}/s")
