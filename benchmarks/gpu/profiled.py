"""An engine process, ours or the reference's, that records where its time goes while it is told to (`where.py`).

SIGUSR1 begins a recording and the next one ends it: of the device first (kernels, and calls of the runtime), then of
Python in the main thread, which costs too much beside the other. Each ends in a JSON file `PROFILE_TO`.device or
.python: for each name how often and for how many seconds.
"""

from __future__ import annotations

import cProfile
import importlib
import itertools
import json
import os
import pstats
import signal
from pathlib import Path
from typing import Any, Protocol

KIND_VARIABLE, FILE_VARIABLE = "PROFILED", "PROFILE_TO"
MAINS = {"sglang": "gpu_scheduler.engines.sglang.__main__", "stock": "benchmarks.gpu.stock"}
Found = dict[str, tuple[int, float]]
"""Name -> (times, seconds)."""


class Recorder(Protocol):
    name: str

    def begin(self) -> None: ...

    def end(self) -> Found: ...


class Device:
    name = "device"

    def begin(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])
        self._profile.start()

    def end(self) -> Found:
        self._profile.stop()
        found: Found = {}
        for event in self._profile.events() or ():
            on_device = "CUDA" in str(event.device_type)
            name = ("" if on_device else "host: ") + str(event.name)
            spent = (event.device_time if on_device else event.cpu_time) / 1e6
            times, seconds = found.get(name, (0, 0.0))
            found[name] = (times + 1, seconds + spent)
        return found


class Python:
    name = "python"

    def begin(self) -> None:
        self._profile = cProfile.Profile()
        self._profile.enable()

    def end(self) -> Found:
        self._profile.disable()
        found: Found = {}
        stats: dict[Any, Any] = pstats.Stats(self._profile).stats  # type: ignore[attr-defined]
        for (file, line, function), (_, times, own_s, _, _) in stats.items():
            where = "/".join(Path(file).parts[-2:])
            found[f"{where}:{line} {function}" if line else function] = (times, own_s)
        return found


def install(path: str) -> None:
    turns = itertools.cycle((Device(), Python()))
    running: list[Recorder] = []

    def toggle(*_: object) -> None:
        if not running:
            running.append(next(turns))
            running[0].begin()
            return
        recorder = running.pop()
        part = Path(f"{path}.part")
        part.write_text(json.dumps(recorder.end()))
        part.rename(f"{path}.{recorder.name}")

    signal.signal(signal.SIGUSR1, toggle)


if __name__ == "__main__":
    install(os.environ[FILE_VARIABLE])
    importlib.import_module(MAINS[os.environ[KIND_VARIABLE]]).main()
