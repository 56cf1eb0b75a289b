"""The models of a group and their residencies: who is here, in what state, and the one change that each may be in.

This file keeps the record; `residency` carries changes out, and brings models up by way of `activation`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gpu_scheduler.engines.engine import EngineProcess
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.rpc.watch import Watched
from services.telemetry.spans import UNTRACED, Span

Images = dict[str, list[str]]
"""Models whose weights the loader holds: the checksums of their parts, by rank."""


@dataclass(eq=False)
class ResidencyChange:
    """A change of residency under way, followed by any number of callers."""

    target: common_pb2.Residency
    began: float
    progress: Watched[gpu_scheduler_pb2.ResidencyProgress]
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    note: str = ""
    """Why it did not come to its target, and is no failure."""
    ended: bool = False


@dataclass(eq=False)
class Resident:
    """One model on this group. It stays recorded while its engine is replaced; a model that left is forgotten."""

    spec: common_pb2.ModelSpec
    residency: common_pb2.Residency
    reason: str = ""
    engine: EngineProcess | None = None
    listed: common_pb2.ModelSpec | None = None
    """What the node's catalogue said when placement told `spec`; None: nothing."""
    loaded: tuple[common_pb2.ModelSpec, common_pb2.ModelSpec] | None = None
    """`spec` and `listed` when its engine was given it to read; the catalogue may say otherwise by now."""
    measured: engine_pb2.Measured = field(default_factory=engine_pb2.Measured)
    elsewhere: gpu_scheduler_pb2.Elsewhere = field(default_factory=gpu_scheduler_pb2.Elsewhere)
    """What placement said that other groups had measured; counts until its engine here has."""
    image_checksums: list[str] = field(default_factory=list)
    """Of the image that was made of this engine's weights, by rank; empty: none, or not by us."""
    kept_bytes: int = 0
    """To be booked of each device for its sleeping engine, which was found to keep a little less; 0: not known."""
    asking: asyncio.Task[None] | None = None
    """Waiting to hear that, after it fell asleep."""
    change: ResidencyChange | None = None
    saving: asyncio.Task[None] | None = None
    """The image being made after a first load."""
    no_image: str = ""
    """Why none could be made of this engine's weights, the last time that it was tried."""
    wake_s: float = 0.0
    """What its last wake-up from hibernation took; 0: none yet."""
    cold_s: float = 0.0
    """What its last start in a fresh engine took; 0: none yet."""
    came_s: float = 0.0
    """The later one of these two."""
    steps: list[tuple[str, float]] = field(default_factory=list)
    """Of the activation under way, or the last: each step and when it began (monotonic seconds), with an empty name
    behind the last one. A step that was interrupted by another is there again."""
    weights_from: list[str] = field(default_factory=list)
    """By rank, at the activation under way, or the last: "checkpoint", "image", or a device."""
    activation: Span = UNTRACED
    """Of the activation under way, or the last."""
    compiling: bool = False
    """Kernels were compiled, or are being, since it began to come up; false when it is up."""
    kernels_compiled: int = 0
    """Since it began to come up the last time."""
    image_only: bool = False
    """What a device gave did not do: the next activation takes the image."""
    active_at: float = 0.0
    """When it became active last (monotonic seconds)."""
    rest: asyncio.TimerHandle | None = None
    """While it is in ERROR for a time."""
    retry_s: float = 0.0
    """Of ERROR: how long it lasts, before a request brings it up again; 0: until its files are read afresh."""
    reading: int = 0
    """Of ERROR: the loader's reading of its files by then."""
    deaths: int = 0
    """Of its engines, in a row."""
    stats: engine_pb2.EngineStats = field(default_factory=engine_pb2.EngineStats)
    past: engine_pb2.EngineStats = field(default_factory=engine_pb2.EngineStats)
    """Counters of engines that are gone; `total` adds them."""

    @property
    def up_s(self) -> float:
        """What bringing it up took the last time that it began as now, with or without an engine; 0: never done."""
        return self.wake_s if self.engine is not None else self.cold_s

    @property
    def active_s(self) -> float:
        """Since it became active; 0 while it is not."""
        return time.monotonic() - self.active_at if self.residency == common_pb2.ACTIVE else 0.0

    def step_seconds(self) -> dict[str, float]:
        """How long each step of the last activation took."""
        seconds: dict[str, float] = {}
        for (name, began), (_, after) in pairwise(self.steps):
            seconds[name] = seconds.get(name, 0.0) + after - began
        return seconds

    def total(self, name: str) -> Any:
        """A counter of EngineStats, whole or of seconds, over all engines that the model had here."""
        return getattr(self.past, name) + getattr(self.stats, name)

    def engine_gone(self) -> None:
        """Its engine died or was given back: keep what it counted."""
        for name in (
            "retractions",
            "evicted_tokens",
            "hibernations",
            "forward_steps",
            "prefill_tokens",
            "decode_tokens",
            "decode_steps",
            "urgent_steps",
            "stood_still_s",
        ):
            setattr(self.past, name, self.total(name))
        self.stats = engine_pb2.EngineStats()
        self.engine = None
        self.kept_bytes = 0
        self.no_image = ""


class Residents:
    """All models of the group by name. `on_change` is called after every change of a residency."""

    def __init__(self, on_change: Callable[[Resident], None]) -> None:
        self._by_name: dict[str, Resident] = {}
        self.operator_limits: dict[str, int] = {}
        """Bytes of KV by model, as operators set them; kept while this process lives, also when the model leaves and
        returns."""
        self.listed: dict[str, common_pb2.ModelSpec] = {}
        """Models of this node's catalogue without a fault, as its loader told last. Placement's generations are those
        of one node, and files that were copied to another are of another generation there."""
        self.readings: dict[str, int] = {}
        """Of all models of this node's catalogue, as its loader told last: another number each time that the files were
        read afresh."""
        self.drained = False
        """Placement keeps the group empty: no model comes up here."""
        self.stopping = False
        """The process ends soon."""
        self._on_change = on_change

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Resident | None:
        return self._by_name.get(name)

    def of_this_node(self, spec: common_pb2.ModelSpec) -> common_pb2.ModelSpec:
        """With the generation that the checkpoint has here, where that is known."""
        here = self.listed.get(spec.name, spec).generation
        if not spec.generation or here == spec.generation:
            return spec
        own = common_pb2.ModelSpec()
        own.CopyFrom(spec)
        own.generation = here
        return own

    def is_outdated(self, resident: Resident) -> bool:
        """Whether the catalogue of this node says now that its engine read something else. Nodes may list a model with
        different contexts, and placement tells each of them what one says: that alone is no reason to read it
        again."""
        now = self.listed.get(resident.spec.name)
        if resident.engine is None or resident.loaded is None or now is None:
            return False
        told, listed = resident.loaded
        return now.generation != told.generation or now.context_tokens not in (
            told.context_tokens,
            listed.context_tokens,
        )

    def of_engine(self, engine: EngineProcess) -> Resident | None:
        return next((resident for resident in self._by_name.values() if resident.engine is engine), None)

    def enter(self, spec: common_pb2.ModelSpec) -> Resident:
        """The record of a model, made if there is none, with this spec from now on; one that tells no more than a name,
        of a model that is not listed any more, changes nothing."""
        resident = self._by_name.get(spec.name)
        if resident is None:
            resident = self._by_name[spec.name] = Resident(spec, common_pb2.COLD)
        elif spec.generation or not resident.spec.generation:
            resident.spec = spec
        return resident

    def leave(self, resident: Resident) -> None:
        if self._by_name.get(resident.spec.name) is resident:
            del self._by_name[resident.spec.name]
            self._on_change(resident)

    def set(self, resident: Resident, residency: common_pb2.Residency, reason: str = "") -> None:
        if residency == common_pb2.ACTIVE != resident.residency:
            resident.active_at = time.monotonic()
        resident.residency, resident.reason = residency, reason
        self._on_change(resident)
        if resident.change is not None:
            self.tell(resident)

    def tell(self, resident: Resident, progress: common_pb2.Progress | None = None) -> None:
        """Tells those who follow the change under way."""
        change = resident.change
        if change is None:
            return
        message = gpu_scheduler_pb2.ResidencyProgress(
            residency=resident.residency, reason=resident.reason, seconds=time.monotonic() - change.began
        )
        if progress is not None:
            message.progress.CopyFrom(progress)
        change.progress.set(message)
