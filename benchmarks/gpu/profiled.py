"""An engine process, ours or the reference's, that records where its time goes while it is told to (`where.py`).

A file `PROFILE_TO`.toggle begins a recording, between two turns of SGLang's loop, and the next one ends it. Recorders
come one after the other, as `PROFILE_WITH` names them:

    stages   the parts of a turn of SGLang's loop, and how long the device took for its forward pass; nearly free
    python   every function of the main thread, which slows it down
    device   kernels, and calls of the runtime (torch's profiler does not bear memory that is mapped under it)

Each ends in a JSON file `PROFILE_TO`.NAME: for each name how often and for how many seconds.
"""

from __future__ import annotations

import cProfile
import functools
import importlib
import itertools
import json
import os
import pstats
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

KIND_VARIABLE, FILE_VARIABLE, RECORDERS_VARIABLE = "PROFILED", "PROFILE_TO", "PROFILE_WITH"
MAINS = {"sglang": "gpu_scheduler.engines.sglang.__main__", "stock": "benchmarks.gpu.stock"}
_LOOK_S = 0.02
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


class Stages:
    """Names begin with what the turn of the loop ran: prefill, decode or nothing."""

    name = "stages"
    _SRT = "sglang.srt"
    _PARTS = (
        ("receive", f"{_SRT}.managers.scheduler:Scheduler.ingest_requests"),
        ("take requests", f"{_SRT}.managers.scheduler:Scheduler.process_input_requests"),
        ("plan", f"{_SRT}.managers.scheduler:Scheduler.get_next_batch_to_run"),
        ("plan/prefill", f"{_SRT}.managers.scheduler:Scheduler.get_new_batch_prefill"),
        ("plan/decode", f"{_SRT}.managers.scheduler:Scheduler.update_running_batch"),
        ("plan/for extend", f"{_SRT}.managers.schedule_batch:ScheduleBatch.prepare_for_extend"),
        ("plan/for decode", f"{_SRT}.managers.schedule_batch:ScheduleBatch.prepare_for_decode"),
        ("run", f"{_SRT}.managers.scheduler:Scheduler.run_batch"),
        ("run/forward", f"{_SRT}.model_executor.model_runner:ModelRunner.forward"),
        ("run/store", f"{_SRT}.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer"),
        ("results", f"{_SRT}.managers.scheduler:Scheduler.process_batch_result"),
        ("evict", f"{_SRT}.mem_cache.unified_radix_cache:UnifiedRadixCache.evict"),
        ("cache finished", f"{_SRT}.mem_cache.unified_radix_cache:UnifiedRadixCache.checkpoint"),
        ("grow", "gpu_scheduler.engines.sglang.kv.elastic_kv:ElasticKv.grow"),
        ("take from other kinds", "gpu_scheduler.engines.sglang.kv.engine_kv:EngineKv._make_way"),
        ("acquire", "balloond.driver.kv.range:ElasticRange.acquire"),
        ("settle", "gpu_scheduler.engines.sglang.kv.slot_transfer:CudaIds.settle"),
        ("provide states", "gpu_scheduler.engines.sglang.kv.state_provisioning:StateProvisioning.provide"),
        ("ask ahead", "gpu_scheduler.engines.sglang.kv.provisioning:KvProvisioning.ask_ahead"),
        ("prefer growth", "gpu_scheduler.engines.sglang.kv.provisioning:KvProvisioning.prefer_growth"),
        ("attend", "gpu_scheduler.engines.sglang.step.reclaim:Reclaim.attend"),
        ("before allocation", "gpu_scheduler.engines.sglang.kv.provisioning:KvProvisioning.before_allocation"),
    )

    def __init__(self) -> None:
        self._wrapped: list[tuple[Any, str, Any]] = []
        self._found: dict[str, list[float]] = {}
        self._turn: dict[str, list[float]] = {}
        self._kind = "nothing"
        self._began = 0.0
        self._passes: list[tuple[str, Any, Any]] = []

    def begin(self) -> None:
        for label, where in self._PARTS:
            module, _, path = where.partition(":")
            owner, _, method = path.partition(".")
            self._wrap(getattr(importlib.import_module(module), owner), method, label)
        self._began = time.perf_counter()

    def _wrap(self, owner: Any, method: str, label: str) -> None:
        original = getattr(owner, method)
        self._wrapped.append((owner, method, original))

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if label == "receive":
                self._next_turn()
            elif label == "run":
                self._kind = "prefill" if args[1].forward_mode.is_extend() else "decode"
            events = self._events() if label == "run/forward" else None
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._add(self._turn, label, time.perf_counter() - began)
                if events is not None:
                    events[1].record()

        setattr(owner, method, timed)

    def _events(self) -> Any:
        import torch

        if not torch.cuda.is_available():
            return None
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._passes.append((self._kind, first, last))
        first.record()
        return first, last

    def _next_turn(self) -> None:
        now = time.perf_counter()
        self._add(self._turn, "turn", now - self._began)
        self._began = now
        for label, (times, seconds) in self._turn.items():
            self._add(self._found, f"{self._kind}: {label}", seconds, times)
        self._turn.clear()
        self._kind = "nothing"

    @staticmethod
    def _add(to: dict[str, list[float]], label: str, seconds: float, times: float = 1) -> None:
        entry = to.setdefault(label, [0, 0.0])
        entry[0] += times
        entry[1] += seconds

    def end(self) -> Found:
        for owner, method, original in self._wrapped:
            setattr(owner, method, original)
        for kind, first, last in self._passes:
            last.synchronize()
            self._add(self._found, f"{kind}: on the device", first.elapsed_time(last) / 1e3)
        return {name: (int(times), seconds) for name, (times, seconds) in self._found.items()}


RECORDERS: dict[str, type[Recorder]] = {each.name: each for each in (Stages, Python, Device)}


def install(path: str, names: list[str]) -> None:
    turns = itertools.cycle([RECORDERS[name] for name in names])
    running: list[Recorder] = []

    def toggle() -> None:
        if not running:
            running.append(next(turns)())
            running[0].begin()
            return
        recorder = running.pop()
        part = Path(f"{path}.part")
        part.write_text(json.dumps(recorder.end()))
        part.rename(f"{path}.{recorder.name}")

    threading.Thread(target=_watch, args=(Path(f"{path}.toggle"), toggle), daemon=True).start()


def _watch(file: Path, toggle: Callable[[], None]) -> None:
    while True:
        time.sleep(_LOOK_S)
        if file.exists():
            file.unlink()
            _before_next_turn(toggle)


def _before_next_turn(toggle: Callable[[], None]) -> None:
    """In the main thread, which the profiler of Python is for."""
    scheduler: Any = importlib.import_module("sglang.srt.managers.scheduler").Scheduler
    original = scheduler.ingest_requests

    def once(*args: Any, **kwargs: Any) -> Any:
        scheduler.ingest_requests = original
        toggle()
        return scheduler.ingest_requests(*args, **kwargs)

    scheduler.ingest_requests = once


if __name__ == "__main__":
    install(os.environ[FILE_VARIABLE], os.environ[RECORDERS_VARIABLE].split(","))
    importlib.import_module(MAINS[os.environ[KIND_VARIABLE]]).main()
