"""Another time of day for whole processes, by libfaketime where it is installed.

The library is preloaded and its command not used: that one makes a semaphore named after its process, and fails where
one of that name is left over from a process that was killed. The library takes such a one's place.
"""

from __future__ import annotations

from pathlib import Path

_LIBRARY = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
_SHARED_MEMORY = Path("/dev/shm")
_NAMES = ("sem.faketime_sem_", "faketime_shm_")
"""Followed by the process's number: what the library shares with the processes that it starts."""

INSTALLED = _LIBRARY is not None


def ahead(days: int) -> tuple[str, ...]:
    """A command that becomes one for which it is `days` later."""
    return _preloaded(f"FAKETIME={days:+d}d")


def as_in(file: Path) -> tuple[str, ...]:
    """A command that becomes one whose time of day is off by what `file` says, looked at each second; see `write`."""
    return _preloaded(f"FAKETIME_TIMESTAMP_FILE={file}", "FAKETIME_CACHE_DURATION=1")


def write(file: Path, days: int) -> None:
    """Into such a file, in one go."""
    fresh = file.with_suffix(".new")
    fresh.write_text(f"{days:+d}d\n")
    fresh.replace(file)


def forget_the_dead() -> None:
    """Removes what killed processes have left behind."""
    for name in _NAMES:
        for left in _SHARED_MEMORY.glob(f"{name}*"):
            if not Path("/proc", left.name.removeprefix(name)).exists():
                left.unlink(missing_ok=True)


def _preloaded(*settings: str) -> tuple[str, ...]:
    assert _LIBRARY is not None
    return ("env", f"LD_PRELOAD={_LIBRARY}", "FAKETIME_DONT_FAKE_MONOTONIC=1", *settings)
