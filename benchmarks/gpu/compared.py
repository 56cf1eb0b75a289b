"""What `compare` and `two_models` share: model folders, the site, a replay against a stack with what was seen of it,
and results that a killed program does not leave half written."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from balloond.policy import capacity
from benchmarks import replay
from benchmarks.gpu import report, shapes
from benchmarks.gpu.slices import GRAPH_BYTES
from benchmarks.gpu.stack import Site, Timeline, decisions, quiet
from benchmarks.host_pulse import HostPulse
from benchmarks.systems import CPU, GPU, Model
from services.runtime import process_limits
from sim.inputs import trace
from testing.systems.local import World

GIB, MIB = 1 << 30, 1 << 20
REHEARSALS = ("echo", "sglang")
_CONTEXT, _SHORT_CONTEXT = 8192, 2048
_TINY_DEVICE_BYTES = 12 * MIB
"""For each model of a rehearsal's device: its weights and quota, and KV for two of the longest requests."""
TIME_OUT_S = 60.0
"""From when a request is due to its last token."""
_OPTIONS = {
    "": {"random_weights": "1"},
    "echo": {"step_ms": "10", "prefill_tokens_per_s": "20000"},
    "sglang": {"random_weights": "1"},
}


def site(devices: Sequence[str], models: int, capacity_bytes: int, rehearse: str) -> Site:
    """`rehearse`: an engine on the CPU, where devices are as small as `models` of them want."""
    if rehearse:
        nbytes = -(-models // len(devices)) * _TINY_DEVICE_BYTES
        return Site(dict.fromkeys(devices, nbytes), CPU, rehearse, _OPTIONS[rehearse], 1, 512 * MIB)
    # KV has larger extents on a host that allows few descriptors, as under `prism serve`.
    usual = [(capacity_bytes, GPU.kv_extent_bytes)] * len(devices)
    extent = capacity.fitting(usual, process_limits.allow_descriptors()) or GPU.kv_extent_bytes
    sizes = replace(GPU, kv_extent_bytes=extent)
    return Site(dict.fromkeys(devices, capacity_bytes), sizes, "sglang", _OPTIONS[""], 2, 96 * GIB)


def make(folder: Path, wanted: Mapping[str, str], rehearse: str) -> list[Model]:
    """Folders of models by name, in these shapes; in a rehearsal all are tiny."""
    context = _SHORT_CONTEXT if rehearse else _CONTEXT
    made = []
    for name, shape in wanted.items():
        headers = shapes.write_headers(folder / name, "tiny" if rehearse else shape)
        made.append(Model(name, headers, context, 0 if rehearse else GRAPH_BYTES[shape]))
    return made


class ReplayFailed(RuntimeError):
    """A replay that came to nothing."""


async def replayed(
    at: World,
    path: Path,
    *arguments: str,
    slos: Mapping[str, Mapping[str, float]],
    names: Mapping[str, str] | None = None,
    watch_s: float = 0.5,
    settle: bool = True,
) -> dict[str, Any]:
    """What came of the trace (`valid` says whether its schedule was kept), with what the groups told about every
    `watch_s`, how fast the host was meanwhile, and what placement did. `settle`: waits until all queues are empty,
    those of others too. Raises ReplayFailed; TimeoutError where requests never end."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "slos.json").write_text(json.dumps(slos))
        given = ["--url", at.base, "--trace", str(path), "--out", str(folder / "out.json")]
        given += ["--slos", str(folder / "slos.json"), "--time-out-s", str(TIME_OUT_S), *arguments]
        if names is not None:
            (folder / "names.json").write_text(json.dumps(names))
            given += ["--models", str(folder / "names.json")]
        async with HostPulse() as pulse, Timeline(at, watch_s) as timeline:
            process = await asyncio.create_subprocess_exec(sys.executable, "-m", "benchmarks.replay", *given)
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
            if status not in (0, replay.INVALID):
                raise ReplayFailed(f"the replay of {path.name} ended with status {status}")
            if settle:
                await quiet(at, TIME_OUT_S)
        found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    found["host"] = pulse.found
    found["timeline"] = timeline.rows
    found["began"] = at_first(timeline.rows)
    found["came_up"] = came_up(timeline.rows)
    found["decisions"] = await decisions(at, time.monotonic() - began)
    return found


def at_first(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The group of each model as a timeline begins: the one that has it awake, or else one where it sleeps."""
    found: dict[str, str] = {}
    first = {row["group"]: row for row in reversed(rows)}.values()
    for residency in ("hibernating", "active"):
        for row in first:
            found.update({name: row["group"] for name, of in row["models"].items() if of["residency"] == residency})
    return found


def came_up(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How often each model's weights came to a group's devices within a timeline: it woke there, or came where it was
    not before. Groups count sleeps: between two rows a model woke as often as it slept, but for how it was at them."""
    times: dict[str, int] = {}
    known: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        before = known.get(row["group"])
        for name, of in row["models"].items():
            sleeps, asleep = of.get("hibernations", 0), of["residency"] == "hibernating"
            if before is None:
                more = 0
            elif (was := before.get(name)) is None:
                more = 1 + sleeps - asleep
            else:
                more = sleeps - was.get("hibernations", 0) + (was["residency"] == "hibernating") - asleep
            times[name] = times.get(name, 0) + more
        known[row["group"]] = row["models"]
    return times


def write_trace(path: Path, rows: Iterable[Sequence[object]]) -> Path:
    """Requests in order of time, columns as `sim/inputs/trace.py` has them; returns the path."""
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([trace.COLUMNS, *rows])
    return path


def write(out: Path, name: str, commit: str, result: dict[str, Any]) -> None:
    """`<out>/<name>.json`, whole or not at all; of a replay that is not valid `<name>.invalid.json`. What a replay says
    of its own circumstances is its client's: the GPU is not in it."""
    if "circumstances" in result:
        result = {**result, "client": result["circumstances"]}
        del result["circumstances"]
    name += "" if result.get("valid", True) else ".invalid"
    half = report.write(out / "half", name, commit, result)
    os.replace(half, out / half.name)
