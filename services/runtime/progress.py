"""How far long work is, for a person who waits: a bar on a terminal, elsewhere a line every ten seconds.

Bars are tqdm's. What stands behind them is written here, so that downloads, starts and wakes read alike.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

EVERY_S = 10.0
"""Seconds between two lines where there is no terminal."""
BAR = "{name}: {step} {percentage:3.0f}% |{bar:24}| {far}"
"""tqdm's format of a bar whose `format_dict` is that of `drawn`."""
_LEAST_BAR = 4
"""Columns below which a bar tells less than the room for it is worth."""
_NO_BAR = "{name}: {step}{far}, {elapsed}"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000 as the hub shows them: "1.5 GB"."""
    number, unit = float(nbytes), 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number, unit = number / 1000, unit + 1
    return f"{number:.0f} {_UNITS[unit]}" if unit == 0 or number >= 99.95 else f"{number:.1f} {_UNITS[unit]}"


@dataclass(frozen=True)
class Far:
    """How far a step of some work is."""

    step: str
    done: float = 0
    total: float = 0
    """0: unknown."""
    unit: str = "bytes"
    per_s: float | None = None
    """Units per second; None: unknown, and a bar goes by what it has seen."""
    left_s: float | None = None

    def amount(self, size: Callable[[float], str] = size) -> str:
        """ "1.2 GB of 16.0 GB, 500 MB/s, 30 s left"; empty if nothing is counted. `size` writes bytes."""
        write = size if self.unit == "bytes" else lambda count: f"{count:.0f}"
        kind = "" if self.unit == "bytes" else f" {self.unit}"
        if not self.total:
            return f"{write(self.done)}{kind} so far" if self.done else ""
        parts = [f"{write(self.done)} of {write(self.total)}{kind}"]
        if self.per_s and self.unit == "bytes":
            parts.append(f"{write(self.per_s)}/s")
        left_s = (self.total - self.done) / self.per_s if self.left_s is None and self.per_s else self.left_s
        if left_s is not None:
            parts.append(f"{left_s:.0f} s left")
        return ", ".join(parts)


def drawn(shown: dict[str, Any], name: str, far: Far, size: Callable[[float], str] = size) -> dict[str, Any]:
    """tqdm's `format_dict` with what `BAR` has beside it. `shown`: that of tqdm, by which a rate is known that nobody
    told. On a narrow terminal the bar gets what its words leave."""
    if far.per_s is None and (since := shown["n"] - shown["initial"]) > 0 and shown["elapsed"] > 0:
        far = Far(far.step, far.done, far.total, far.unit, shown["rate"] or since / shown["elapsed"], far.left_s)
    amount = far.amount(size)
    if shown.get("bar_format") == BAR and shown.get("ncols"):
        room = shown["ncols"] - len(f"{name}: {far.step} 100% || {amount}") - 1
        width = f"|{{bar:{min(room, 24)}}}| " if room >= _LEAST_BAR else ""
        shown = {**shown, "bar_format": BAR.replace("|{bar:24}| ", width)}
    return {**shown, "name": name, "step": far.step, "far": amount if far.total or not amount else f", {amount}"}


def aside() -> AbstractContextManager[None]:
    """A context in which lines may be printed: bars make way for them."""
    return tqdm.external_write_mode()  # type: ignore[no-any-return]


def _has_terminal() -> bool:
    """Whether standard error is a terminal that can show a bar: one that some programs make has no size."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except (OSError, ValueError):
        return False


class ProgressLines:
    """Says every `every_s` seconds how far some work is. Threads may share it."""

    def __init__(
        self, say: Callable[[str], None], every_s: float = EVERY_S, size: Callable[[float], str] = size
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._size = size
        self._lock = threading.Lock()
        self._told = time.monotonic()

    def show(self, far: Far) -> None:
        with self._lock:
            if time.monotonic() - self._told < self._every_s:
                return
            self._told = time.monotonic()
            amount = far.amount(self._size)
            self._say(f"{far.step}, {amount}" if amount else far.step)


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # no thread of its own: it is drawn when it is told something

    def __init__(self, name: str, far: Far, size: Callable[[float], str]) -> None:
        self._name, self._far, self._write = name, far, size
        form = BAR if far.total else _NO_BAR
        super().__init__(total=far.total or None, initial=far.done, bar_format=form, leave=False, mininterval=0)

    @property
    def format_dict(self) -> dict[str, Any]:
        return drawn(super().format_dict, self._name, self._far, self._write)

    def move(self, far: Far) -> None:
        self._far, self.n = far, far.done
        self.refresh()


class ProgressMeter:
    """Shows on standard error how far some work is, until it is closed; a context that closes it."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        *,
        size: Callable[[float], str] = size,
        every_s: float = EVERY_S,
    ) -> None:
        """`name`: what a bar begins with, the program's. `say` prints a line where there is no terminal."""
        self._name = name
        self._size = size
        self._lines = None if _has_terminal() else ProgressLines(say, every_s, size)
        self._bar: _Bar | None = None
        self._shown: tuple[str, float, str] | None = None

    @property
    def draws(self) -> bool:
        """Whether there is a terminal."""
        return self._lines is None

    def show(self, far: Far) -> None:
        """Shows it; a step that is another one than before, or has another total, gets a new bar."""
        if self._lines is not None:
            self._lines.show(far)
            return
        kind = far.step, far.total, far.unit
        if self._bar is None or kind != self._shown:
            self.close()
            self._bar, self._shown = _Bar(self._name, far, self._size), kind
        else:
            self._bar.move(far)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> ProgressMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
