"""Arbitration on a group, by the gpu_scheduler's policy: what `gpu_scheduler/queue/dispatcher.py` does, without its
I/O.

Every event marks the queue as changed; it is planned once for all events of the same moment. The policy's own modules
decide: backlog, admission, throttling, holdings, speeds, forecasts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from math import inf, isnan
from typing import TYPE_CHECKING

from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from gpu_scheduler.policy.memory import holdings
from gpu_scheduler.policy.memory.demand import TokenRate, weight
from gpu_scheduler.policy.memory.forecast import ForecastRules, OutputForecast
from gpu_scheduler.policy.memory.kv_shortage import KvShortages
from gpu_scheduler.policy.queue import admission
from gpu_scheduler.policy.queue.backlog import Backlog
from gpu_scheduler.policy.queue.decisions import NeedMemory, Start
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest
from gpu_scheduler.policy.throttle.throttling import ThrottleController
from sim.clock import Timer
from sim.engines.engine import SimulatedEngine
from sim.inputs.request import SimulatedRequest

if TYPE_CHECKING:
    from sim.group.node import SimulatedGroup, SimulatedResident

RESUME_S = 1.0
"""Seconds that an interrupted stream gets to go on, as `gpu_scheduler/queue/requests.py` gives it."""
_ROOM_TIMEOUT_S, _ROOM_HELD_S = 5.0, 1.0
"""Seconds that a room is waited for and held, as `gpu_scheduler/memory/memory_requests.py` asks for it."""
_ASK_AGAIN_S = 0.05
"""Seconds between two requests for memory. A gpu_scheduler asks again as soon as it was answered: bounded here, because
a room may be there (balloond has so many bytes free) and the request still lack memory (admission has set these bytes
aside for what runs)."""


class _Model:
    """State of one model's requests on this group."""

    def __init__(self, speed: PrefillSpeed, forecast: ForecastRules, now: float) -> None:
        self.speed = speed
        self.forecast = OutputForecast(forecast)
        self.rate = TokenRate()
        self.tpot_s = inf
        self.last_event = now
        self.requests = 0
        self.committed = 0
        self.at_engine = 0
        """Number of requests that the model's engine has."""


class Arbiter:
    """The shared queue of a group; the listener of its engines."""

    def __init__(self, group: SimulatedGroup, rules: Arbitration) -> None:
        self._group = group
        self._clock = group.clock
        self._rules = rules
        self._turn = rules.turn
        self.prefill_priority_batch = rules.prefill_priority_batch
        self.prefill_priority_s = rules.prefill_priority_ms / 1e3
        self.decode_arbitration_s = rules.decode_arbitration_ms / 1e3
        self._backlog = Backlog(rules.backlog)
        self._protection = ThrottleController()
        self._models: dict[str, _Model] = {}
        self._requests: dict[str, SimulatedRequest] = {}
        self._planned = False
        """Whether a plan was already scheduled for this moment."""
        self._timer: Timer | None = None
        self._asking: set[str] = set()
        self._paces: dict[str, PrefillThrottle] = {}
        """Model -> throttle as its engine was last told."""
        self._waiting = 0
        """Number of requests that no engine has."""
        self._quiet = False
        """Whether nothing waits and nothing prefills, and the engines were told: until a request comes, no plan can
        change anything."""
        self.lack = KvShortages()
        self._on_time: Iterable[str] = ()
        self.plans = 0
        self.changes = 0
        """Rises when requests come or go, and when residencies change."""

    # --- requests

    def submit(self, request: SimulatedRequest) -> None:
        now = self._clock.now
        model = self._know(request.model)
        model.last_event = now
        self.changes += 1
        model.tpot_s = request.tpot_s if request.tpot_s < inf else model.tpot_s
        model.requests += 1
        self._waiting += 1
        self._requests[request.id] = request
        if isnan(request.first_at):
            deadline = request.deadline
        else:
            deadline = now + RESUME_S if request.deadline < inf else inf
        self._backlog.add(
            WaitingRequest(
                request.id,
                request.model,
                request.arrival,
                deadline,
                request.to_prefill,
                decode_tokens=min(request.most_new_tokens, model.forecast.tokens),
            ),
            now,
        )
        self._changed()

    def hand_back(self, name: str) -> list[SimulatedRequest]:
        """Removes and returns all waiting requests of a model."""
        waiting = [self._requests[w.request_id] for w in self._backlog.waiting() if w.model == name]
        for request in waiting:
            self.forget(request)
        return waiting

    def forget(self, request: SimulatedRequest) -> None:
        """Removes a request that has left the group, for whatever reason."""
        now = self._clock.now
        del self._requests[request.id]
        self._backlog.finish(request.id, now)
        self._protection.ended(request.model, request.id)
        model = self._models[request.model]
        model.last_event = now
        self.changes += 1
        model.requests -= 1
        self._waiting -= not request.committed
        model.at_engine -= bool(request.committed)
        model.committed -= request.committed
        request.committed = 0
        self._changed()

    def idle_s(self, name: str) -> float:
        """Seconds since the model's last request arrived or ended; 0 while one is here."""
        model = self._models.get(name)
        if model is None or model.requests:
            return 0.0
        return self._clock.now - model.last_event

    def claims(self) -> Counter[str]:
        """Model -> number of its waiting requests that can still be on time."""
        waiting = (self._requests.get(request_id) for request_id in self._on_time)
        return Counter(request.model for request in waiting if request is not None and not request.committed)

    @property
    def empty(self) -> bool:
        return not self._requests

    def _know(self, name: str) -> _Model:
        model = self._models.get(name)
        if model is None:
            now = self._clock.now
            speed = PrefillSpeed(self._rules.default_prefill_tokens_per_s)
            model = self._models[name] = _Model(speed, self._rules.forecast, now)
            self._backlog.add_model(name, speed)
            self._backlog.model_waking(name, now + self._rules.wake_estimate_s)
            self._protection.measured(name, self._rules.default_prefill_tokens_per_s, 0.0)
        return model

    # --- residencies

    def residency_changed(self, resident: SimulatedResident) -> None:
        name = resident.spec.name
        self.changes += 1
        model = self._know(name)
        if resident.active:
            cost = resident.cost
            if not self._backlog.is_active(name):
                chunk = cost.chunk_tokens
                model.speed.observe(chunk, chunk / cost.prefill_tokens_per_s)
                self._protection.measured(name, cost.prefill_tokens_per_s, cost.decode_step_s)
            self._backlog.model_active(name)
        else:
            estimate = resident.up_s or self._rules.wake_estimate_s
            self._backlog.model_waking(name, self._clock.now + estimate if resident.waking else inf)
        self._paces.pop(name, None)  # the model's next engine has been told none
        self._changed()

    # --- engines

    def first_token(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        now = self._clock.now
        model = self._models[request.model]
        seconds = self._backlog.prefill_finished(request.id, now)
        model.rate.observe(request.to_prefill, now)
        self._protection.decodes(request.model, request.id, self._tpot_s(request))
        self._backlog.observe(request.model, request.to_prefill - 1, seconds)
        if isnan(request.first_at):
            request.first_at = now
        self._changed()

    def prefilled(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self._backlog.progress(request.id, self._clock.now, computed_tokens=request.prefilled)
        self._changed()

    def stepped(self, engine: SimulatedEngine, steps: int, tokens: int) -> None:
        now = self._clock.now
        self._protection.step(engine.name, now, steps)
        self._models[engine.name].rate.observe(tokens, now)

    def finished(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self._models[request.model].forecast.observe(request.output_tokens)
        self.forget(request)
        self._group.finished(request)

    def parked(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        now = self._clock.now
        model = self._models[request.model]
        model.at_engine -= bool(request.committed)
        model.committed -= request.committed
        request.committed = 0
        self._waiting += 1
        self._protection.ended(request.model, request.id)
        deadline = now + RESUME_S if request.deadline < inf else inf
        self._backlog.requeue(request.id, now, prompt_tokens=request.to_prefill, deadline=deadline)
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
        self._plan()
        self._planned = False
        due = self._backlog.next_deadline()
        if due < inf:
            self._timer = self._clock.at(due, self._changed)

    def _plan(self) -> None:
        now = self._clock.now
        idle = not self._waiting and not self._backlog.in_flight()
        if idle and self._quiet:
            return
        self._quiet = idle
        self.plans += 1
        agenda = self._backlog.plan(now)
        self._on_time = agenda.on_time
        active = self._group.active
        if not (agenda.on_time or agenda.second) or not active:
            self.lack.look((), {}, now)
            self._tell_engines()
            return
        memory = holdings.for_admission(
            [self._group.memory.for_admission()],
            {name: resident.token_bytes for name, resident in active.items()},
            {name: model.committed for name, model in self._models.items()},
        )
        started: list[SimulatedRequest] = []
        needs: list[NeedMemory] = []
        most = {name: resident.cost.hardware.most_running for name, resident in active.items()}
        places = {name: count - self._models[name].at_engine for name, count in most.items()}
        for step in admission.admit(agenda, self._backlog, memory, self._turn, places):
            if isinstance(step, Start):
                started.append(self._start(step, active, now))
            else:
                needs.append(step)
                self._need_memory(step)
        self.lack.look(needs, self._backlog.waiting_by_model(), now)
        self._tell_engines()
        for request in started:
            engine = active[request.model].engine
            assert engine is not None
            engine.generate(request)

    def _start(self, start: Start, active: dict[str, SimulatedResident], now: float) -> SimulatedRequest:
        request = self._requests[start.request_id]
        model = self._models[request.model]
        self._backlog.start(start, now)
        self._protection.started(request.model, request.id, self._tpot_s(request))
        tokens = request.to_prefill + min(request.most_new_tokens, model.forecast.tokens)
        request.committed = tokens * active[request.model].token_bytes
        model.committed += request.committed
        model.at_engine += 1
        self._waiting -= 1
        return request

    def _tpot_s(self, request: SimulatedRequest) -> float:
        return request.tpot_s if request.tpot_s < inf else self._rules.default_tpot_ms / 1e3

    def _tell_engines(self) -> None:
        if not self._rules.experiments.protect_decodes:
            return
        in_flight = self._backlog.in_flight()
        now = self._clock.now
        self._protection.prefills({waiting.model for waiting in in_flight}, now)
        engines = self._group.active
        for name, pace in self._protection.paces(
            self._backlog.pressed, self._backlog.late_models(), partial(self._backlog.late_by_pauses, now=now)
        ).items():
            if pace == self._paces.get(name):
                continue
            self._paces[name] = pace
            self._backlog.model_paced(name, pace.slowdown, pace.chunk_tokens, now)
            resident = engines.get(name)
            if resident is not None and resident.engine is not None:
                resident.engine.set_pace(pace)

    # --- memory

    def _need_memory(self, need: NeedMemory) -> None:
        """Asks for the memory that a request lacks; one such request at a time for each model."""
        if need.model in self._asking:
            return
        self._asking.add(need.model)
        self._group.memory.device.set_demand(self.demand())
        self._group.memory.make_room(
            need.model,
            need.bytes,
            lambda short: self._room(need.model, short),
            may_retract=self._rules.stop_decodes and need.slack < inf,
            hold_s=_ROOM_HELD_S,
            timeout_s=_ROOM_TIMEOUT_S,
        )

    def _room(self, name: str, short: int) -> None:
        self._clock.after(_ASK_AGAIN_S, self._may_ask, name)
        if short == 0:
            self._changed()

    def _may_ask(self, name: str) -> None:
        self._asking.discard(name)
        self._changed()

    def demand(self) -> dict[str, float]:
        """Demand w of every resident, in bytes per second per second of TPOT."""
        now = self._clock.now
        found = {}
        for name, resident in self._group.residents.items():
            model = self._know(name)
            target_ms = 1e3 * model.tpot_s if model.tpot_s < inf else 0.0
            found[name] = weight(model.rate.rate(now), resident.token_bytes, target_ms)
        return found
