"""The models of a group and their residencies: which models are here, in what state, and the one change that each may
be in.

This file keeps the record; `residency` carries changes out, and brings models up with `activation`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.policy.adapter_room import PoolShape
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.rpc.watch import Watched
from services.telemetry.spans import UNTRACED, Span


def pool_of(spec: common_pb2.ModelSpec) -> PoolShape:
    """Room for adapters with which a model is loaded."""
    return PoolShape.of(spec.adapters.slots, spec.adapters.rank, spec.adapters.modules)


Images = dict[str, list[str]]
"""By model whose weights the loader holds: the checksums of their parts, by rank."""


@dataclass(eq=False)
class ResidencyChange:
    """A change of residency under way, followed by any number of callers. `began`: monotonic seconds."""

    target: common_pb2.Residency
    began: float
    progress: Watched[gpu_scheduler_pb2.ResidencyProgress]
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    note: str = ""
    """Why the change did not reach its target, if that is not a failure."""
    ended: bool = False


@dataclass(eq=False)
class Resident:
    """One model on this group. Its record stays while its engine is replaced; a model that left is forgotten.
    `measured`, `stats` and `kept_bytes` count bytes of one device, `spec` and `elsewhere` those of all its devices
    together."""

    spec: common_pb2.ModelSpec
    residency: common_pb2.Residency
    reason: str = ""
    engine: EngineProcess | None = None
    listed: common_pb2.ModelSpec | None = None
    """The node's catalogue entry when placement sent `spec`; None: it had none."""
    loaded: tuple[common_pb2.ModelSpec, common_pb2.ModelSpec] | None = None
    """`spec` and `listed` when the engine was given the model to load; the catalogue may have changed since."""
    measured: engine_pb2.Measured = field(default_factory=engine_pb2.Measured)
    elsewhere: gpu_scheduler_pb2.Elsewhere = field(default_factory=gpu_scheduler_pb2.Elsewhere)
    """Other groups' measurements of the model, from placement; they count until the engine here has measured itself."""
    image_checksums: list[str] = field(default_factory=list)
    """Checksums, by rank, of the image that was made of this engine's weights; empty: none was made, or not by this
    group."""
    kept_bytes: int = 0
    """Bytes to book on each device for the sleeping engine, which keeps a little less; 0: unknown."""
    asking: asyncio.Task[None] | None = None
    """Task that waits for the engine to report `kept_bytes` after it fell asleep."""
    change: ResidencyChange | None = None
    saving: asyncio.Task[None] | None = None
    """Task that has an image made after a load from the checkpoint."""
    no_image: str = ""
    """Why the last attempt to make an image of this engine's weights failed; empty: none failed."""
    wake_s: float = 0.0
    """Seconds that its last wake-up from hibernation took; 0: none yet."""
    cold_s: float = 0.0
    """Seconds that its last start in an engine without the model took; 0: none yet."""
    came_s: float = 0.0
    """Seconds that its last activation took, of either kind."""
    steps: list[tuple[str, float]] = field(default_factory=list)
    """Steps of the activation under way, or the last: each with its begin (monotonic seconds), and an empty name behind
    the last one. A step that was interrupted by another appears again."""
    progress: common_pb2.Progress = field(default_factory=common_pb2.Progress)
    """What was last told of the activation under way, or the last."""
    weights_from: list[str] = field(default_factory=list)
    """Source of the weights, by rank, at the activation under way, or the last: "checkpoint", "image", or a device."""
    activation: Span = UNTRACED
    """Span of the activation under way, or the last."""
    compiling: bool = False
    """True if kernels were compiled since the activation under way began; false once the model is up."""
    kernels_compiled: int = 0
    """Kernels compiled since the last activation began."""
    image_only: bool = False
    """True if weights from another device did not verify: the next activation takes the image."""
    active_at: float = 0.0
    """When it last became active (monotonic seconds)."""
    rest: asyncio.TimerHandle | None = None
    """Timer that ends an ERROR of limited time."""
    retry_s: float = 0.0
    """Seconds that ERROR lasts before a request may bring the model up again; 0: until its files are read afresh."""
    reading: int = 0
    """Number of the loader's reading of the model's files when it went into ERROR."""
    deaths: int = 0
    """Deaths of its engines in a row."""
    stats: engine_pb2.EngineStats = field(default_factory=engine_pb2.EngineStats)
    past: engine_pb2.EngineStats = field(default_factory=engine_pb2.EngineStats)
    """Counters of engines that are gone; `total` adds them."""

    @property
    def up_s(self) -> float:
        """Seconds that the last activation of the kind now due took, from sleep or in an engine without the model; 0:
        never done."""
        return self.wake_s if self.engine is not None else self.cold_s

    @property
    def active_s(self) -> float:
        """Seconds since it became active; 0 while it is not."""
        return time.monotonic() - self.active_at if self.residency == common_pb2.ACTIVE else 0.0

    @property
    def waking_s(self) -> float:
        """Seconds since the activation under way began; 0 if none is under way, or it has not come to a step yet."""
        waking = self.residency == common_pb2.WAKING and self.steps
        return time.monotonic() - self.steps[0][1] if waking else 0.0

    def takes(self, adapter: common_pb2.Adapter) -> bool:
        """Whether its engine has, or will have, room for an adapter."""
        spec = self.spec if self.engine is None or self.loaded is None else self.loaded[0]
        return pool_of(spec).covers(PoolShape.of(0, adapter.rank, adapter.modules))

    def step_seconds(self) -> dict[str, float]:
        """Seconds that each step of the last activation took, by name."""
        seconds: dict[str, float] = {}
        for (name, began), (_, after) in pairwise(self.steps):
            seconds[name] = seconds.get(name, 0.0) + after - began
        return seconds

    def total(self, name: str) -> Any:
        """A counter of EngineStats (a count, or seconds) over all engines that the model had here."""
        return getattr(self.past, name) + getattr(self.stats, name)

    def engine_gone(self) -> None:
        """Its engine died or was given back: keeps what it counted."""
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
        """KV limits in bytes, by model, as operators set them; kept while this process lives, also when the model
        leaves and returns."""
        self.listed: dict[str, common_pb2.ModelSpec] = {}
        """Entries without a fault of this node's catalogue, as its loader last reported. Placement's generations are
        those of one node; files that were copied to another node have another generation there."""
        self.readings: dict[str, int] = {}
        """Number of the last reading of a model's files, by model of this node's catalogue: it changes each time that
        the files were read afresh."""
        self.drained = False
        """True while placement keeps the group empty: no model comes up here."""
        self.stopping = False
        """True once the process is about to end."""
        self._on_change = on_change

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(list(self._by_name.values()))

    def get(self, name: str) -> Resident | None:
        return self._by_name.get(name)

    def of_this_node(self, spec: common_pb2.ModelSpec) -> common_pb2.ModelSpec:
        """`spec` with the generation that the checkpoint has on this node, if that is known."""
        here = self.listed.get(spec.name, spec).generation
        if not spec.generation or here == spec.generation:
            return spec
        own = common_pb2.ModelSpec()
        own.CopyFrom(spec)
        own.generation = here
        return own

    def adapter(self, name: str) -> common_pb2.Adapter | None:
        """The adapter of this name in this node's catalogue; None: it is none."""
        spec = self.listed.get(name)
        return spec.adapter if spec is not None and spec.HasField("adapter") else None

    def heard_catalogue(self, listed: dict[str, common_pb2.ModelSpec]) -> None:
        """Takes in the entries without a fault of this node's catalogue. Engines let go of adapters that left it."""
        before, self.listed = self.listed, listed
        for name, spec in before.items():
            if spec.HasField("adapter") and self.adapter(name) != spec.adapter:
                resident = self._by_name.get(spec.adapter.base)
                if resident is not None and resident.engine is not None:
                    resident.engine.forget_adapter(spec.adapter)

    def is_outdated(self, resident: Resident) -> bool:
        """Whether the model's engine read something else than this node's catalogue lists now. Nodes may list a model
        with different contexts or types of KV, and placement sends one node's to all: that alone is no reason to load
        it again. An engine with more room for adapters than the catalogue's need now may stay."""
        now = self.listed.get(resident.spec.name)
        if resident.engine is None or resident.loaded is None or now is None:
            return False
        told, listed = resident.loaded
        return (
            now.generation != told.generation
            or now.context_tokens not in (told.context_tokens, listed.context_tokens)
            or now.kv_dtype not in (told.kv_dtype, listed.kv_dtype)
            or not (pool_of(told).covers(pool_of(now)) or pool_of(listed).covers(pool_of(now)))
        )

    def of_engine(self, engine: EngineProcess) -> Resident | None:
        return next((resident for resident in self._by_name.values() if resident.engine is engine), None)

    def enter(self, spec: common_pb2.ModelSpec) -> Resident:
        """The record of a model, made if there is none, with `spec` from now on. A spec that is no more than a name, of
        a model that is not listed any more, does not replace a known one."""
        resident = self._by_name.get(spec.name)
        if resident is None:
            resident = self._by_name[spec.name] = Resident(spec, common_pb2.COLD)
        elif spec.generation or not resident.spec.generation:
            resident.spec = spec
        return resident

    def leave(self, resident: Resident) -> None:
        """Forgets a model that has no engine here any more. Whoever follows the change that ends so hears that it is
        cold: the state that it was in before, and an error's reason, are of the past."""
        resident.residency, resident.reason = common_pb2.COLD, ""
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
        """Reports progress to the followers of the change under way, and keeps it for reports of the group."""
        if progress is not None:
            resident.progress = progress
        change = resident.change
        if change is None:
            return
        message = gpu_scheduler_pb2.ResidencyProgress(
            residency=resident.residency, reason=resident.reason, seconds=time.monotonic() - change.began
        )
        if progress is not None:
            message.progress.CopyFrom(progress)
        change.progress.set(message)

    def step(self, resident: Resident, name: str) -> None:
        """Notes and reports that the activation under way begins a step."""
        resident.steps.append((name, time.monotonic()))
        self.tell(resident, common_pb2.Progress(step=name, total=1, unit="steps"))
