"""Progress of a download: the library's bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

_BYTES_WRITTEN = "huggingface_hub.snapshot_download"
"""The library's name of the one bar that counts bytes on disk."""
_FORMAT = "prism: {percentage:3.0f}% |{bar:32}| {n_fmt}B of {total_fmt}B, {rate_fmt}, {remaining} left"
_EVERY_S = 10.0
_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000 as the hub shows them: "1.5 GB"."""
    number, unit = float(nbytes), 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 or number >= 99.95 else f"{number:.1f} {_UNITS[unit]}"


class Progress:
    """Shows one download of so many bytes while the context is open. `bars`: what the library is given as its class of
    bars."""

    def __init__(self, total_bytes: int, say: Callable[[str], None]) -> None:
        shown: list[tqdm] = []

        class Bar(tqdm):  # type: ignore[misc]
            total = property(lambda self: total_bytes, lambda self, value: None)
            """The library learns sizes file by file; here they are known."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                counts = kwargs.get("name") == _BYTES_WRITTEN
                if not counts:
                    kwargs["disable"] = True
                kwargs |= {"position": 0, "leave": False, "bar_format": _FORMAT}
                super().__init__(*args, **kwargs)
                self._lines = _Lines(total_bytes, say) if counts and self.disable else None
                if counts:
                    shown.append(self)

            def update(self, n: float | None = 1) -> Any:
                if self._lines is not None:
                    self._lines.add(int(n or 0))
                return super().update(n)

        self.bars: type[tqdm] = Bar
        self._shown = shown

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._shown:
            bar.close()


class _Lines:
    """Tells how far a download is where there is no terminal. Threads may share it."""

    def __init__(self, total_bytes: int, say: Callable[[str], None]) -> None:
        self._total = total_bytes
        self._say = say
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._told = time.monotonic()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._told < _EVERY_S:
                return
            self._told = now
            rate = self._done / (now - self._began)
            self._say(f"{size(self._done)} of {size(self._total)}, {size(rate)}/s")
