"""Kills engines that hang; they are then replaced like others that died."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.policy.hang_detector import LOOK_S, HangDetector, HangVerdict
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.residents import Residents
from gpu_scheduler.telemetry import counters
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_COMPILES_S = 300.0
"""Seconds that an engine may compile one kernel, which it does between two steps; nvcc takes 7 to 25 s on an idle
host."""


async def watch_engines(
    residents: Residents,
    dispatcher: Dispatcher,
    stall_timeout_s: float,
    compiles_s: float = _COMPILES_S,
    *,
    look_s: float = LOOK_S,
    detector: Callable[[float], HangDetector] = HangDetector,
) -> None:
    """Looks at all engines every `look_s` seconds, for ever, and kills those that hang. `stall_timeout_s`: the timeout
    of policy/hang_detector.py. `detector`: makes the detector of an engine, with that timeout. Loads, wake-ups and
    compilations have timeouts of their own."""
    detectors: dict[EngineProcess, HangDetector] = {}
    while True:
        await asyncio.sleep(look_s)
        engines = {resident.engine: resident.spec.name for resident in residents if resident.engine is not None}
        detectors = {engine: detectors.get(engine) or detector(stall_timeout_s) for engine in engines if engine.alive}
        for engine, watched in list(detectors.items()):
            requests, prefill_s = dispatcher.work_of(engine)
            works = (bool(requests) or engine.owes) and not engine.commanded
            works = works and not 0 < engine.compiling_s < compiles_s
            verdict = watched.look(time.monotonic(), works=works, heard=engine.heard, prefill_s=prefill_s)
            if verdict is HangVerdict.ASK:
                engine.ping()
            elif verdict is HangVerdict.GIVE_UP:
                silent_s = round(watched.silent_s, 1)
                model = engines[engine]
                _log.error("engine stands still", model=model, engine=engine.pid, silent_s=silent_s, requests=requests)
                counters.STALLED.labels(model).inc()
                del detectors[engine]
                tasks.spawn(engine.give_up(), f"give up engine {engine.pid}")
