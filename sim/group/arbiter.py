"""The shared queue of a group: the gpu_scheduler's own core (`gpu_scheduler/policy/group_core.py`) on simulated engines
and a virtual clock.

Every event marks the queue as changed; it is planned once for all events of the same moment.
"""

from __future__ import annotations

from collections import Counter
from math import inf, isnan

from gateway.policy.replica_choice import GroupOutlook
from gpu_scheduler.config import Arbitration
from gpu_scheduler.policy.group_core import GroupCore
from gpu_scheduler.policy.group_facts import ArrivedRequest, ModelFacts, Presence
from gpu_scheduler.policy.queue.decisions import ROOM_FOR_REQUEST, NeedMemory, RequestMemory, SetThrottle, Start
from sim.clock import Timer
from sim.engines.engine import SimulatedEngine
from sim.group.node import SimulatedGroup, SimulatedResidency, SimulatedResident
from sim.inputs.request import SimulatedRequest

_PRESENCE = {
    SimulatedResidency.ACTIVE: Presence.ACTIVE,
    SimulatedResidency.WAKING: Presence.WAKING,
    SimulatedResidency.GONE: Presence.GONE,
}
"""Presence by residency; in the others a model is down."""


class SimulatedQueue:
    """The shared queue of a group; the listener of its engines."""

    def __init__(self, group: SimulatedGroup, rules: Arbitration) -> None:
        self._group = group
        self._clock = group.clock
        self.prefill_priority_batch = rules.prefill_priority_batch
        self.prefill_priority_s = rules.prefill_priority_ms / 1e3
        self.decode_arbitration_s = rules.decode_arbitration_ms / 1e3
        self._core = GroupCore(rules.group, self._clock.now)
        self._requests: dict[str, SimulatedRequest] = {}
        self._planned = False
        """Whether a plan was already scheduled for this moment."""
        self._timer: Timer | None = None
        self.shortages = self._core.shortages
        self.targets: Counter[tuple[str, bool]] = Counter()
        """(model, whether its target was met) -> number of first tokens with a target."""
        self.changes = 0
        """Rises when requests come or go, and when residencies change."""

    # --- requests

    def submit(self, request: SimulatedRequest) -> None:
        self.changes += 1
        self._requests[request.id] = request
        self._core.arrived(
            ArrivedRequest(
                request.id,
                request.model,
                request.arrival,
                request.to_prefill,
                request.most_new_tokens,
                deadline=request.deadline,
                tpot_s=request.tpot_s if request.tpot_s < inf else 0.0,
                resumed=not isnan(request.first_at),
            ),
            self._clock.now,
        )
        self._changed()

    def hand_back(self, name: str) -> list[SimulatedRequest]:
        """Removes and returns all waiting requests of a model."""
        waiting = [self._requests[request_id] for request_id in self._core.waiting_of(name)]
        for request in waiting:
            self.forget(request)
        return waiting

    def forget(self, request: SimulatedRequest) -> None:
        """Removes a request that leaves the group before its end."""
        self._end(request, 0)

    def _end(self, request: SimulatedRequest, output_tokens: int) -> None:
        self.changes += 1
        del self._requests[request.id]
        self._core.ended(request.id, self._clock.now, output_tokens)
        self._changed()

    def idle_s(self, name: str) -> float:
        """Seconds since the model's last request arrived or ended; 0 while one is here."""
        return self._core.idle_s(name, self._clock.now)

    def outcomes(self, name: str) -> tuple[int, int, int]:
        """(waiting requests of the model that are late, targets that its requests missed, returns of the model)."""
        model = self._core.model(name, self._clock.now)
        return self._core.count(name)[2], model.ttft_missed + model.tpot_missed, model.returns

    def claims(self) -> Counter[str]:
        """Model -> number of its waiting requests that can still be on time."""
        return Counter(self._requests[request_id].model for request_id in self._core.queue_plan.on_time)

    def outlook(self, request: SimulatedRequest) -> GroupOutlook:
        """What a request that came now would meet here."""
        now = self._clock.now
        queue_s, tokens_per_s = self._core.outlook(request.model, now)
        waiting, running, _ = self._core.count(request.model)
        return GroupOutlook(waiting + running, queue_s, tokens_per_s)

    def count(self, name: str) -> tuple[int, int, int]:
        """(waiting, running, late among the waiting) requests of a model."""
        return self._core.count(name)

    @property
    def empty(self) -> bool:
        return not self._requests

    # --- residencies

    def residency_changed(self, resident: SimulatedResident) -> None:
        self.changes += 1
        self._core.model_changed(resident.spec.name, _facts(resident), self._clock.now)
        self._changed()

    # --- engines

    def first_token(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        now = self._clock.now
        met = self._core.first_token(request.id, now)
        if met is not None:
            self.targets[request.model, met] += 1
        self._core.tokens(request.model, 1, now)
        if isnan(request.first_at):
            request.first_at = now
        self._changed()

    def prefilled(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self._core.prefilled(request.id, self._clock.now, request.prefilled)
        self._changed()

    def stepped(self, engine: SimulatedEngine, steps: int, tokens: int) -> None:
        self._core.step_ended(engine.name, self._clock.now, steps)
        self._core.tokens(engine.name, tokens, self._clock.now)

    def finished(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self._end(request, request.output_tokens)
        self._group.finished(request)

    def parked(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self._core.retracted(request.id, self._clock.now, request.to_prefill, request.most_new_tokens)
        self._changed()

    # --- the plan

    def _changed(self) -> None:
        if not self._planned:
            self._planned = True
            self._clock.after(0.0, self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._carry_out()
        self._planned = False
        due = self._core.next_plan_at()
        if due < inf:
            self._timer = self._clock.at(due, self._changed)

    def _carry_out(self) -> None:
        group = self._group
        for decision in self._core.plan(self._clock.now, lambda: [group.memory.for_admission()]):
            match decision:
                case Start(request_id):
                    request = self._requests[request_id]
                    engine = group.active[request.model].engine
                    assert engine is not None
                    engine.generate(request)
                case SetThrottle(model, throttle):
                    resident = group.active.get(model)
                    if resident is not None and resident.engine is not None:
                        resident.engine.set_throttle(throttle)
                case RequestMemory():
                    self._request_memory(decision)
                case NeedMemory():
                    pass  # `shortages` has it
                case _:
                    raise RuntimeError(f"unexpected decision {decision}")

    # --- memory

    def _request_memory(self, request: RequestMemory) -> None:
        self._group.memory.device.set_demand(self.demand())
        self._group.memory.make_room(
            request.model,
            request.bytes,
            lambda short: self._answered(request, short),
            may_retract=False,
            terms=ROOM_FOR_REQUEST,
        )

    def _answered(self, request: RequestMemory, short: int) -> None:
        self._core.memory_answered(request, short == 0, self._clock.now)
        if short == 0:
            self._changed()

    def demand(self) -> dict[str, float]:
        """Demand w of every resident, in bytes per second per second of TPOT."""
        return {name: self._core.demand(name, self._clock.now) for name in self._group.residents}


def _facts(resident: SimulatedResident) -> ModelFacts:
    cost = resident.cost
    return ModelFacts(
        _PRESENCE.get(resident.residency, Presence.DOWN),
        resident.kv,
        prefill_tokens_per_s=cost.prefill_tokens_per_s,
        prefill_chunk_tokens=cost.chunk_tokens,
        decode_step_s=cost.decode_step_s,
        most_running=cost.hardware.most_running,
        up_s=resident.up_s,
    )
