"""A group: its devices' memory and compute, its engines, and the residencies of its models.

A residency changes in the steps of `gpu_scheduler/residency/activator.py` and `residency.py`: book, make room, fill,
wake; or drain, empty, book what a sleeping engine keeps. Their durations are the cost model's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from gpu_scheduler.policy.queue.decisions import ROOM_FOR_ACTIVATION
from kv_kinds.layout import KvLayout
from loader.policy.floor import floor_bytes
from services.errors import Refused
from sim.clock import Clock, Timer
from sim.engines.cost import Cost, GpuModel, graph_bytes
from sim.engines.engine import EngineListener, SimulatedEngine
from sim.engines.processor import Processor, Task
from sim.group.memory import SimulatedMemory
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest


class Queue(EngineListener, Protocol):
    """The queue that orders a group's requests; each policy has its own. It is also the listener of the group's
    engines."""

    prefill_priority_s: float
    """The most seconds that prefill steps go before neighbours' decodes, for the group's engines."""
    prefill_priority_batch: int
    """The most requests for which neighbours decode and still stand still for one prompt's prefill, for the group's
    engines."""
    decode_arbitration_s: float
    """The most seconds that decode steps wait for neighbours' decode steps, for the group's engines."""

    def submit(self, request: SimulatedRequest) -> None: ...

    def hand_back(self, name: str) -> list[SimulatedRequest]:
        """Removes and returns all waiting requests of a model."""

    def forget(self, request: SimulatedRequest) -> None: ...

    def residency_changed(self, resident: SimulatedResident) -> None: ...

    def idle_s(self, name: str) -> float: ...


class SimulatedResidency(Enum):
    ACTIVE = "active"
    WAKING = "waking"
    HIBERNATING = "hibernating"
    DRAINING = "draining"
    GONE = "gone"
    """Cold: the model has no engine here."""


@dataclass(eq=False, slots=True)
class SimulatedResident:
    """One model on a group."""

    spec: Spec
    cost: Cost
    residency: SimulatedResidency = SimulatedResidency.WAKING
    engine: SimulatedEngine | None = None
    asleep: bool = False
    """Whether the model has an engine that hibernates."""
    wake_s: float = 0.0
    """Seconds that its last wake-up took; 0: none yet."""
    cold_s: float = 0.0
    """Seconds that its last cold start took; 0: none yet."""
    active_at: float = 0.0
    """Second at which it last became active."""
    kv: KvLayout = field(init=False)
    """The kinds of KV that a request needs on each device."""
    drained: Callable[[], None] | None = None
    """While it drains: called when its engine is empty."""
    drain_timer: Timer | None = None
    past_tokens: int = 0
    """Tokens of the model's earlier engines here."""

    def __post_init__(self) -> None:
        self.kv = self.spec.shape.kv.share(self.spec.parts)

    @property
    def active(self) -> bool:
        return self.residency is SimulatedResidency.ACTIVE

    @property
    def waking(self) -> bool:
        return self.residency is SimulatedResidency.WAKING

    @property
    def up_s(self) -> float:
        """Seconds that bringing it up took the last time from the same residency as now; 0: never done."""
        return self.wake_s if self.asleep else self.cold_s

    @property
    def tokens(self) -> int:
        """Prompt and output tokens that were ever processed on this group."""
        engine = self.engine
        return self.past_tokens + (engine.prefill_tokens + engine.decode_tokens() if engine is not None else 0)


@dataclass(slots=True)
class Counts:
    """Counts of what happened on a group."""

    wakes: int = 0
    cold_starts: int = 0
    failed_activations: int = 0
    hibernations: int = 0
    gone_cold: int = 0
    weights_bytes: int = 0
    """Bytes of weights that were copied onto its devices."""


class SimulatedGroup:
    """A group of devices. `back` gets requests that cannot be served here any more."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        devices: int,
        hardware: GpuModel,
        queue: Callable[[SimulatedGroup], Queue],
        back: Callable[[list[SimulatedRequest]], None],
        finished: Callable[[SimulatedRequest], None],
    ) -> None:
        self.clock = clock
        self.name = name
        self.devices = devices
        self.hardware = hardware
        self.memory = SimulatedMemory(clock, hardware, hardware.capacity_bytes)
        self.residents: dict[str, SimulatedResident] = {}
        self.active: dict[str, SimulatedResident] = {}
        """The residents that are active."""
        self.counts = Counts()
        self.on_finished = finished
        self._back = back
        self.queue = queue(self)
        self.processor = Processor(clock, hardware.sharing, self.queue.prefill_priority_batch, hardware.decode_sharing)

    def __repr__(self) -> str:
        residents = ", ".join(f"{name} {r.residency.value}" for name, r in self.residents.items())
        return f"SimulatedGroup({self.name}, {residents})"

    def own_bytes(self, spec: Spec) -> int:
        """Bytes of weights and graphs on each device, as they are booked."""
        unit = self.hardware.weights_unit_bytes
        weights = -(-spec.shape.weights_bytes // spec.parts)
        return sum(-(-part // unit) * unit for part in (weights, graph_bytes(spec.shape, self.hardware)))

    def floor(self, spec: Spec) -> int:
        """Bytes of a model's floor on each device, in whole extents."""
        layout = spec.shape.kv.share(spec.parts)
        return floor_bytes(spec.context_tokens, 0, layout, self.hardware.kv_extent_bytes)

    def finished(self, request: SimulatedRequest) -> None:
        """Notes that a request has finished; called by the queue."""
        resident = self.residents.get(request.model)
        if resident is not None and resident.drained is not None:
            self.clock.after(0.0, self._look_drained, resident)
        self.on_finished(request)

    # --- up

    def activate(self, spec: Spec, done: Callable[[bool], None], yields: Sequence[tuple[str, bool]] = ()) -> None:
        """Brings a model up. `yields`: (model, whether it goes cold) of models that make way. `done` is called later,
        with whether the model is active."""
        resident = self.residents.get(spec.name)
        if resident is None:
            resident = self.residents[spec.name] = SimulatedResident(spec, Cost(spec.shape, self.hardware))
        self._set(resident, SimulatedResidency.WAKING)
        self._make_way(resident, list(yields), done)

    def _make_way(
        self, resident: SimulatedResident, yields: list[tuple[str, bool]], done: Callable[[bool], None]
    ) -> None:
        while yields:
            name, cold = yields.pop(0)
            other = self.residents.get(name)
            if other is not None and other.residency in (SimulatedResidency.ACTIVE, SimulatedResidency.HIBERNATING):
                self.bring_down(name, cold, lambda: self._make_way(resident, yields, done))
                return
        self._entitle(resident, done)

    def _entitle(self, resident: SimulatedResident, done: Callable[[bool], None]) -> None:
        spec = resident.spec
        own, floor = self.own_bytes(spec), self.floor(spec)
        try:
            self.memory.book(spec.name, self.hardware.quota_bytes, own, floor)
        except Refused:
            self.clock.after(0.0, self._failed, resident, done)
            return
        self.memory.make_room(
            spec.name,
            own + floor,
            lambda short: self._memory_made(resident, done, short),
            may_retract=True,
            terms=ROOM_FOR_ACTIVATION,
        )

    def _memory_made(self, resident: SimulatedResident, done: Callable[[bool], None], short: int) -> None:
        if short:
            self._failed(resident, done)
            return
        name, asleep = resident.spec.name, resident.asleep
        if resident.engine is None:
            resident.engine = SimulatedEngine(
                self.clock,
                name,
                resident.cost,
                self.processor,
                self.memory,
                self.queue,
                self.queue.prefill_priority_s,
                self.queue.decode_arbitration_s,
            )
            self.memory.open(resident.engine)
        self.memory.fill(name, self.own_bytes(resident.spec))
        seconds = resident.cost.wake_s if asleep else resident.cost.cold_s
        if not asleep and self.hardware.capture_share > 0:
            self._capture(resident.cost.capture_s)
        self.clock.after(seconds, self._up, resident, done, seconds)

    def _capture(self, seconds: float) -> None:
        """Has an engine that comes up take its part of the devices for so long."""
        task = Task(lambda: None)
        self.processor.work(task, 2 * seconds, devices=self.hardware.capture_share)
        self.clock.after(seconds, self.processor.rest, task)

    def _up(self, resident: SimulatedResident, done: Callable[[bool], None], seconds: float) -> None:
        if resident.asleep:
            resident.wake_s, resident.asleep = seconds, False
            self.counts.wakes += 1
        else:
            resident.cold_s = seconds
            self.counts.cold_starts += 1
        self.counts.weights_bytes += resident.spec.shape.weights_bytes
        self._set(resident, SimulatedResidency.ACTIVE)
        self.memory.release_room(resident.spec.name)
        done(True)

    def _failed(self, resident: SimulatedResident, done: Callable[[bool], None]) -> None:
        """Puts everything back after a failed activation."""
        name = resident.spec.name
        self.counts.failed_activations += 1
        if resident.asleep:
            self.memory.book(name, self.hardware.kept_bytes, 0, 0)
            self._set(resident, SimulatedResidency.HIBERNATING)
        else:
            if name in self.memory.device.ledger.bookings:
                self.memory.unbook(name)
            self._leave(resident)
        self._back(self.queue.hand_back(name))
        done(False)

    # --- down

    def bring_down(self, name: str, cold: bool, done: Callable[[], None], drain_s: float = 0.0) -> None:
        """Brings a model down. Waiting requests are handed back at once, running ones when `drain_s` seconds are
        over."""
        resident = self.residents[name]
        if resident.residency is SimulatedResidency.HIBERNATING:
            self._down(resident, cold, done)
            return
        self._set(resident, SimulatedResidency.DRAINING)
        self._back(self.queue.hand_back(name))
        resident.drained = lambda: self._down(resident, cold, done)
        resident.drain_timer = self.clock.after(drain_s, self._drained, resident)
        self._look_drained(resident)

    def _look_drained(self, resident: SimulatedResident) -> None:
        if resident.drained is not None and resident.engine is not None and resident.engine.empty:
            self._drained(resident)

    def _drained(self, resident: SimulatedResident) -> None:
        if resident.drained is None or resident.engine is None:
            return
        go_on, resident.drained = resident.drained, None
        if resident.drain_timer is not None:
            resident.drain_timer.cancel()
            resident.drain_timer = None
        left = resident.engine.retire()
        for request in left:
            self.queue.forget(request)
        parked = self.queue.hand_back(resident.spec.name)
        self._back([*left, *parked])
        self.clock.after(self.hardware.hibernate_s, go_on)

    def _down(self, resident: SimulatedResident, cold: bool, done: Callable[[], None]) -> None:
        name = resident.spec.name
        if cold:
            self.memory.close(name)
            self.memory.unbook(name)
            resident.past_tokens, resident.engine = resident.tokens, None
            resident.asleep = False
            self.counts.gone_cold += 1
            self._leave(resident)
        else:
            self.memory.empty(name)
            self.memory.book(name, self.hardware.kept_bytes, 0, 0)
            resident.asleep = True
            self.counts.hibernations += 1
            self._set(resident, SimulatedResidency.HIBERNATING)
        done()

    # --- records

    def _set(self, resident: SimulatedResident, residency: SimulatedResidency) -> None:
        resident.residency = residency
        if residency is SimulatedResidency.ACTIVE:
            resident.active_at = self.clock.now
            self.active[resident.spec.name] = resident
        else:
            self.active.pop(resident.spec.name, None)
        self.queue.residency_changed(resident)

    def _leave(self, resident: SimulatedResident) -> None:
        del self.residents[resident.spec.name]
        self._set(resident, SimulatedResidency.GONE)

    def check(self) -> None:
        """Raises AssertionError if bytes are missing or counted twice."""
        self.memory.check()
