"""The whole system with many models and the settings of one of the systems that are compared: up, warm, watched."""

from __future__ import annotations

import asyncio
import contextlib
import tarfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import systems
from benchmarks.systems import Model, Sizes, System
from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.policy.assignment.partition import Part
from protos import common_pb2, gpu_scheduler_pb2
from services.errors import PrismError
from services.runtime import tasks
from testing.systems.local import World, world

_WARM_S = 400.0
"""Kernels are compiled when a machine first sees them: 73 to 190 s of eight engines on each of two pairs of GPUs."""
_OF_A_RESIDENT = (
    *("waiting", "late", "running", "kv_used_bytes", "kv_held_bytes", "kv_cached_bytes", "kv_limit_bytes"),
    *("prefill_tokens", "decode_tokens", "retractions", "evicted_tokens", "hibernations"),
    *("decode_steps", "urgent_steps", "stood_still_s", "decode_step_s"),
)


@dataclass(frozen=True)
class Site:
    """Where systems run."""

    devices: Mapping[str, int]
    """Bytes for models on each; each is a group."""
    sizes: Sizes
    engine: str
    options: Mapping[str, str]
    """Of every engine."""
    warm: int
    """Engines of each device with their imports done."""
    host_bytes: int
    """For weight images."""
    engine_log_level: str = "warning"
    """info: SGLang tells of steps as well, which costs each a little."""


@contextlib.asynccontextmanager
async def stack(system: System, models: Sequence[Model], parts: Mapping[str, Part], site: Site) -> AsyncIterator[World]:
    """Up, with every model's weights in host memory; then whatever fits is active."""
    local: dict[str, Any] = systems.local(system, parts)
    local["gateway"] = {"park_time_out_s": 120.0, "most_in_flight": 8192}
    async with world(
        site.engine,
        systems.listed(system, models, parts, site.sizes),
        options=dict(site.options),
        devices=dict(site.devices),
        engines=2 * len(models),
        warm=site.warm,
        host_capacity_bytes=site.host_bytes,
        engine_log_level=site.engine_log_level,
        kv_extent_bytes=site.sizes.kv_extent_bytes,
        **local,
    ) as at:
        await warm(at, models, at_once=len(site.devices) if system.alone else len(models))
        yield at


def keep_logs(at: World, path: Path) -> None:
    """Of all services, as an archive."""
    with tarfile.open(path, "w:xz") as archive:
        archive.add(at.local.state / "logs", arcname=path.name.partition(".")[0])


async def warm(at: World, models: Sequence[Model], at_once: int) -> None:
    """A few tokens of each model, the largest first, and its image. Raises TimeoutError, RuntimeError."""
    slots = asyncio.Semaphore(at_once)
    largest_first = sorted(models, key=lambda m: -(m.folder / "model.safetensors").stat().st_size)

    async def one(model: Model) -> None:
        async with slots:
            began = time.monotonic()
            await first_answer(at, model.name)
            await imaged(at, model.name, _WARM_S)
            print(f"{model.name}: warm after {time.monotonic() - began:.1f} s", flush=True)

    async with asyncio.timeout(_WARM_S), asyncio.TaskGroup() as group:
        for model in largest_first:
            group.create_task(one(model), name=f"warm {model.name}")


async def first_answer(at: World, name: str) -> None:
    """A few tokens of a model that may have to be brought up for them, however long that takes. Raises RuntimeError
    where it cannot be."""
    body = {"model": name, "prompt": list(range(10, 42)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    while True:
        # Where kernels are compiled first it may take longer than the client waits for an answer.
        with contextlib.suppress(TimeoutError):
            async with at.http.post(f"{at.base}/v1/completions", json=body) as answer:
                if answer.status == 200:
                    return
                if answer.status not in (429, 503):
                    raise RuntimeError(f"{name}: {await answer.text()}")
        await asyncio.sleep(0.5)


async def imaged(at: World, name: str, timeout_s: float) -> None:
    """Until the weights of a model are in host memory. Raises TimeoutError."""
    loader = LoaderClient(at.local.unix("loader"))
    try:
        async with asyncio.timeout(timeout_s):
            while not (await loader.state(name)).entry.has_image:
                await asyncio.sleep(0.1)
    finally:
        await loader.close()


async def quiet(at: World, timeout_s: float) -> None:
    """Until no request is in any queue or engine. Raises TimeoutError."""

    async def idle() -> bool:
        return not any(m.waiting or m.running for g in (await at.placement.cluster()).groups for m in g.models)

    await at.until(idle, "requests never ended", timeout_s)


class Timeline:
    """What the groups tell of their models, about so often; `rows` by time from the beginning of the block."""

    def __init__(self, at: World, every_s: float) -> None:
        self._at = at
        self._every_s = every_s
        self.rows: list[dict[str, Any]] = []

    async def __aenter__(self) -> Timeline:
        self._began = time.monotonic()
        names = self._at.local.group_names
        self._watching = [tasks.spawn(self._watch(name), f"watch {name}") for name in names]
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.cancel(*self._watching)
        self.rows.sort(key=lambda row: row["at_s"])

    async def _watch(self, group: str) -> None:
        client = GpuSchedulerClient(self._at.local.unix(self._at.local.scheduler(group)))
        due = 0.0
        try:
            async for state in client.watch():
                at_s = time.monotonic() - self._began
                if state is not None and at_s >= due:
                    due = at_s + self._every_s
                    self.rows.append({"at_s": round(at_s, 3), "group": group, **_row(state)})
        finally:
            await client.close()


def _row(state: gpu_scheduler_pb2.GroupState) -> dict[str, Any]:
    def resident(each: gpu_scheduler_pb2.Resident) -> dict[str, Any]:
        told = {name: value for name in _OF_A_RESIDENT if (value := getattr(each, name))}
        return {"residency": common_pb2.Residency.Name(each.residency).lower(), **told}

    return {"free_bytes": state.free_bytes, "models": {each.model: resident(each) for each in state.residents}}


async def decisions(at: World, within_s: float) -> dict[str, int]:
    """What placement did in the last seconds, and how often: "activate", "activate failed", ..."""
    try:
        told = await at.placement.explain()
    except PrismError as error:
        return {f"not told: {error}": 1}
    recent = [each for each in told if each.age_s <= within_s]
    return Counter(each.action + " failed" * each.outcome.startswith("failed") for each in recent)
