"""The shared queue of a group, carried out: requests come in, the policy orders them, engines run them, their tokens go
back.

Every event (a request, a cancellation, tokens, a change of memory or of a residency) marks the queue as changed; one
plan follows for all events that came together; the policy's next deadline is a timer. Nothing polls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from math import inf

from gpu_scheduler.config import Arbitration
from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.engines.shared_board import SharedBoard
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.memory.devices import share
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.policy.memory.demand import TokenRate, weight
from gpu_scheduler.policy.memory.forecast import ForecastRules, OutputForecast
from gpu_scheduler.policy.memory.kv_shortage import KvShortages
from gpu_scheduler.policy.memory.migrated_prefixes import MigratedPrefixes
from gpu_scheduler.policy.queue import admission
from gpu_scheduler.policy.queue.backlog import Backlog, RequestState
from gpu_scheduler.policy.queue.decisions import Drop, NeedMemory, Start
from gpu_scheduler.policy.queue.slack import PrefillSpeed
from gpu_scheduler.policy.throttle.throttling import ThrottleController
from gpu_scheduler.queue.requests import RESUME_S, GroupRequest
from gpu_scheduler.queue.streams import GatewayStream
from gpu_scheduler.residents import Resident, Residents
from gpu_scheduler.telemetry.counters import STARTED, TTFT_TARGETS, forget
from gpu_scheduler.telemetry.traces import RequestTrace
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.telemetry import log

_log = log.get(__name__)
NOT_HERE = "not here"
"""First words of an error after which the gateway asks for another place: nothing failed while the request ran."""
_SERVABLE = (common_pb2.ACTIVE, common_pb2.WAKING)
_KEPT_MODELS = 64
"""Models that have left of which the speed of prefills and the length of answers are still remembered."""
_TOGETHER_S = 0.002
"""Seconds that a plan waits for more streams of a model that moved here: streams that start together go on after one
step, later ones after two."""


class ModelCounters:
    """What one model's requests did on this group, for the report."""

    def __init__(self, forecast: ForecastRules) -> None:
        self.ttft_met = 0
        self.ttft_missed = 0
        self.forecast = OutputForecast(forecast)
        self.last_event = time.monotonic()
        self.tpot_ms = 0
        self.rate = TokenRate()


class Dispatcher:
    """Owns the requests of a group, and receives its engines' tokens."""

    def __init__(
        self,
        rules: Arbitration,
        residents: Residents,
        memory: GroupMemory,
        board: SharedBoard,
        on_need_memory: Callable[[NeedMemory], None],
        on_engine_death: Callable[[EngineProcess], None],
        now: Callable[[], float] = time.monotonic,
        brought: MigratedPrefixes | None = None,
        on_idle_or_busy: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_need_memory` is called for each request that lacks memory, at each plan; `on_engine_death` after the
        requests of a dead engine were failed; `on_idle_or_busy` when a model gets its first request or its last one has
        left."""
        self._rules = rules
        self._residents = residents
        self._memory = memory
        self._board = board
        board.set_prefill_priority(rules.prefill_priority_ms / 1e3, rules.prefill_priority_batch)
        board.set_decode_arbitration(rules.decode_arbitration_ms / 1e3)
        self._on_need_memory = on_need_memory
        self._on_engine_death = on_engine_death
        self._on_idle_or_busy = on_idle_or_busy
        self._now = now
        self._migrated_prefixes = brought or MigratedPrefixes()
        self._backlog = Backlog(rules.backlog)
        self._protection = ThrottleController()
        self._kv_shortages = KvShortages()
        self._paces: dict[int, PrefillThrottle] = {}
        """The throttles last written to the shared board, by index of the engine."""
        self._agenda = self._backlog.plan(now())
        self._speeds: dict[str, PrefillSpeed] = {}
        self._requests: dict[str, GroupRequest] = {}
        self._of_models: Counter[str] = Counter()
        """Number of requests here by model."""
        self._at_engines: dict[str, GroupRequest] = {}
        """Requests that an engine has, by id: a plan looks at these, however many wait."""
        self._by_gateway_id: dict[tuple[GatewayStream, str], GroupRequest] = {}
        self._numbers = 0
        self._order = 0
        self._loop = asyncio.get_running_loop()
        self._planning = True
        """True while a plan is due, and before and after `run`, when none is made."""
        self._timer: asyncio.TimerHandle | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.counters: defaultdict[str, ModelCounters] = defaultdict(lambda: ModelCounters(rules.forecast))
        self._cold_s: dict[str, float] = {}
        """Seconds that a model's last cold start took, by model."""
        self._away: dict[str, None] = {}
        """Models that are remembered but not here, in the order in which they left."""

    # --- requests

    def submit(self, submit: gpu_scheduler_pb2.Submit, stream: GatewayStream) -> None:
        """Takes a request into the queue, or answers at once that it cannot be served here."""
        now = self._now()
        self._numbers += 1
        request = GroupRequest.of(submit, self._numbers, stream, now)
        resident = self._residents.get(request.model)
        if resident is None or resident.residency not in _SERVABLE:
            request.end(common_pb2.FAILED, NOT_HERE)
            return
        if (stream, request.gateway_id) in self._by_gateway_id:
            request.end(common_pb2.REJECTED, f"request id {request.gateway_id} is in use on this stream")
            return
        if why := request.impossible(resident.spec):
            request.end(common_pb2.REJECTED, why)
            return
        counters = self.counters[request.model]
        counters.last_event = now
        counters.tpot_ms = request.tpot_ms or counters.tpot_ms
        self._requests[request.id] = request
        self._by_gateway_id[stream, request.gateway_id] = request
        self._know(request.model)
        if request.resumed_tokens:
            request.cached_tokens = self._migrated_prefixes.cached_tokens(request.model, request.token_ids, now)
        self._backlog.add(request.waiting(counters.forecast.tokens), now)
        self._tally(request.model, 1)
        if submit.traceparent:
            waking = resident.residency == common_pb2.WAKING
            slack_s = self._backlog.slack(request.id, now)
            request.trace = RequestTrace.of(submit.traceparent, now, slack_s, waking)
        if request.cached_tokens:
            self._loop.call_later(_TOGETHER_S, self.changed)
        else:
            self.changed()

    def cancel(self, stream: GatewayStream, gateway_id: str) -> None:
        """Cancels a request that its gateway gave up. No further chunk is sent."""
        request = self._by_gateway_id.get((stream, gateway_id))
        if request is not None:
            if request.engine is not None:
                request.engine.abort(request.id)
            self._forget(request, common_pb2.ABORTED)

    def cancel_stream(self, stream: GatewayStream) -> None:
        """Cancels all requests of a gateway that is gone."""
        stream.close()
        for of_stream, gateway_id in [key for key in self._by_gateway_id if key[0] is stream]:
            self.cancel(of_stream, gateway_id)

    def hand_back(self, model: str, why: str = NOT_HERE) -> None:
        """Ends all waiting requests of a model that cannot be served here any more; their gateways ask for another
        place."""
        for waiting in list(self._backlog.waiting()):
            if waiting.model == model:
                self._end(self._requests[waiting.request_id], common_pb2.FAILED, why)

    def _know(self, model: str) -> None:
        if model not in self._speeds:
            self._speeds[model] = PrefillSpeed(self._rules.default_prefill_tokens_per_s)
            self._backlog.add_model(model, self._speeds[model])
            self._backlog.model_waking(model, self._now() + self._rules.wake_estimate_s)
            self._protection.measured(model, self._rules.default_prefill_tokens_per_s, 0.0)

    def _forget_models(self) -> None:
        """Forgets the models that left longest ago: their names may never come again."""
        for model in list(self._away)[:-_KEPT_MODELS]:
            if model not in self._of_models:
                del self._away[model], self._speeds[model]
                self._cold_s.pop(model, None)
                self.counters.pop(model, None)
                self._backlog.remove_model(model)
                self._protection.forget(model)
                forget(model)

    def _end(self, request: GroupRequest, finish: common_pb2.Finish, error: str = "") -> None:
        request.end(finish, error)
        self._forget(request, finish, error)

    def _forget(self, request: GroupRequest, finish: common_pb2.Finish, error: str = "") -> None:
        if self._requests.pop(request.id, None) is None:
            return
        if request.parked_at:
            self._tell_pause(request, self._now(), "ended here")
        self._at_engines.pop(request.id, None)
        del self._by_gateway_id[request.stream, request.gateway_id]
        self._backlog.finish(request.id, self._now())
        self._protection.ended(request.model, request.id)
        request.end_trace(self._now(), finish, error)
        counters = self.counters[request.model]
        counters.last_event = self._now()
        if request.emitted:
            counters.forecast.observe(len(request.emitted))
        self._tally(request.model, -1)
        self.changed()

    def _tally(self, model: str, more: int) -> None:
        before = self._of_models[model]
        self._of_models[model] += more
        if not before or not self._of_models[model]:
            self._on_idle_or_busy()
        if not self._of_models[model]:
            del self._of_models[model]

    # --- residencies

    def residency_changed(self, resident: Resident) -> None:
        """Called by Residents after every change of a residency."""
        model = resident.spec.name
        self._know(model)
        self._away.pop(model, None)
        if self._residents.get(model) is None:
            self._away[model] = None
            self._forget_models()
        if resident.cold_s:
            self._cold_s[model] = resident.cold_s
        if resident.residency == common_pb2.ACTIVE:
            measured = resident.measured
            if measured.prefill_tokens_per_s > 0 and self._backlog.is_active(model) is False:
                chunk = measured.prefill_chunk_tokens or self._rules.chunk_tokens
                self._speeds[model].observe(chunk, chunk / measured.prefill_tokens_per_s)
                self._protection.measured(model, measured.prefill_tokens_per_s, measured.decode_step_ms / 1e3)
            self._backlog.model_active(model)
        else:
            # A model that went cold comes back as a new record.
            estimate = resident.up_s or self._cold_s.get(model) or self._rules.wake_estimate_s
            waking = resident.residency == common_pb2.WAKING
            self._backlog.model_waking(model, self._now() + estimate if waking else inf)
        self.changed()

    # --- engines (the Listener of engines.base)

    def on_tokens(self, engine: EngineProcess, chunks: list[common_pb2.TokenChunk]) -> None:
        now = self._now()
        if (resident := self._residents.of_engine(engine)) is not None:
            self._protection.step(resident.spec.name, now)
        for chunk in chunks:
            request = self._requests.get(chunk.request_id)
            if request is None or request.engine is not engine:
                continue  # the request was cancelled, or the chunk is of an earlier attempt
            ends = chunk.finish == common_pb2.LENGTH  # a request with `prompt_only` ends without a token
            if (chunk.token_ids or chunk.embedding or ends) and self._backlog.state(
                request.id
            ) is RequestState.DISPATCHED:
                self._first_token(request, chunk, now)
            request.emitted.extend(chunk.token_ids)
            request.scored += len(chunk.prompt_logprobs)
            self.counters[request.model].rate.observe(len(chunk.token_ids), now)
            chunk.request_id = request.gateway_id
            request.stream.push(chunk)
            if chunk.finish:
                self._forget(request, chunk.finish, chunk.error)

    def _first_token(self, request: GroupRequest, chunk: common_pb2.TokenChunk, now: float) -> None:
        seconds = self._backlog.prefill_finished(request.id, now)
        self.counters[request.model].rate.observe(request.prompt_tokens, now)
        self._protection.decodes(request.model, request.id, self._tpot_s(request))
        self._backlog.observe(request.model, max(1, request.prompt_tokens - chunk.cached_tokens), seconds)
        if request.trace is not None:
            request.trace.first_token(now, chunk.cached_tokens)
        if request.parked_at:
            self._tell_pause(request, now)
        if request.first_token_at == 0.0:
            request.first_token_at = now
            if request.resumed_tokens:  # this line shows why its client waited in the middle of an answer
                _log.info(
                    "stream resumed",
                    request_id=request.logged_id,
                    model=request.model,
                    tokens=request.prompt_tokens,
                    brought=request.cached_tokens,
                    cached=chunk.cached_tokens,
                    queued_ms=round(1e3 * (request.sent_at - request.arrival), 1),
                    prefill_ms=round(1e3 * (now - request.sent_at), 1),
                )
            if request.deadline < inf and request.resumed_tokens == 0:
                met = now <= request.deadline
                counters = self.counters[request.model]
                counters.ttft_met += met
                counters.ttft_missed += not met
                TTFT_TARGETS.labels(request.model, str(met).lower()).inc()
        self.changed()

    def _tell_pause(self, request: GroupRequest, now: float, outcome: str = "resumed") -> None:
        """Logs one line for each pause of a stream in this group, as the gateway does for pauses between groups."""
        _log.info(
            "stream paused",
            request_id=request.logged_id,
            model=request.model,
            reason="no KV memory",
            ms=round(1e3 * (now - request.parked_at), 1),
            emitted=len(request.emitted),
            outcome=outcome,
        )
        request.parked_at = 0.0

    def on_prefilled(self, engine: EngineProcess, prompts: list[engine_pb2.Prefilled.Prompt]) -> None:
        now = self._now()
        for prompt in prompts:
            request = self._requests.get(prompt.request_id)
            if request is None or request.engine is not engine:
                continue
            if self._backlog.state(request.id) is RequestState.DISPATCHED:
                self._backlog.progress(
                    request.id, now, computed_tokens=prompt.computed_tokens, cached_tokens=prompt.cached_tokens
                )
                self.changed()

    def on_parked(self, engine: EngineProcess, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None or request.engine is not engine:
            return
        request.engine = None
        del self._at_engines[request_id]
        now = request.parked_at = self._now()
        deadline = now + RESUME_S if request.deadline < inf else inf
        if request.trace is not None:
            request.trace.parked(now)
        resident = self._residents.get(request.model)
        if resident is None or resident.residency not in _SERVABLE:
            # The model is leaving and its waiting requests were handed back already: nothing would start this one here.
            self._end(request, common_pb2.FAILED, NOT_HERE)
            return
        self._protection.ended(request.model, request.id)
        # A request may be dropped only for the target of its first token.
        drop_late = False if request.first_token_at else None
        self._backlog.requeue(
            request.id, now, prompt_tokens=request.prompt_tokens, deadline=deadline, drop_late=drop_late
        )
        self.changed()

    def on_stats(self, engine: EngineProcess, stats: engine_pb2.EngineStats) -> None:
        resident = self._residents.of_engine(engine)
        if resident is not None:
            resident.stats = stats
            self.changed()

    def on_death(self, engine: EngineProcess) -> None:
        for request in [r for r in self._at_engines.values() if r.engine is engine]:
            self._end(request, common_pb2.FAILED, "its engine died")
        self._on_engine_death(engine)

    # --- the loop

    def changed(self) -> None:
        """Has one plan made for all events that come in this iteration of the event loop."""
        if not self._planning:
            self._planning = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        try:
            # Requests that the plan itself ends or starts need no other plan.
            self._plan()
            wait = self._backlog.next_deadline() - self._now()
        except Exception as failure:  # `run` raises it, which ends the process
            self._failed.set_exception(failure)
            return
        self._planning = False
        if wait < inf:
            self._timer = self._loop.call_later(max(0.0, wait), self.changed)

    async def run(self) -> None:
        """Plans whenever something changed or the policy's next deadline is here, in callbacks: a task in between would
        cost every first token a task switch. Runs for ever; raises what a plan raised."""
        self._planning = False
        self.changed()
        try:
            await self._failed
        finally:
            self._planning = True  # no more plans
            if self._timer is not None:
                self._timer.cancel()

    def _plan(self) -> None:
        now = self._now()
        agenda = self._agenda = self._backlog.plan(now)
        for decision in agenda.decisions:
            request = self._requests[decision.request_id]
            dropped = isinstance(decision, Drop)
            self._end(request, common_pb2.LATE if dropped else common_pb2.FAILED, decision.reason)
        active = {r.spec.name: r for r in self._residents if r.residency == common_pb2.ACTIVE}
        if not (agenda.on_time or agenda.second) or not active:
            self._kv_shortages.look((), {}, now)
            self._tell_engines()
            return
        memory = self._memory.for_admission(
            {name: self._kv_bytes_per_token(r) for name, r in active.items()}, self._committed()
        )
        started, needs = [], []
        for step in admission.admit(agenda, self._backlog, memory, self._rules.turn, self._places(active)):
            if isinstance(step, Start):
                started.append(self._start(step, active, now))
            else:
                needs.append(step)
                self._on_need_memory(step)
        self._kv_shortages.look(needs, self._backlog.waiting_by_model(), now)
        # This comes before the requests are sent: else their first steps would not know the throttle.
        self._tell_engines()
        for engine, message in started:
            engine.generate(message)

    def _start(
        self, start: Start, active: dict[str, Resident], now: float
    ) -> tuple[EngineProcess, engine_pb2.Generate]:
        request = self._requests[start.request_id]
        resident = active[request.model]
        assert resident.engine is not None
        self._backlog.start(start, now)
        request.engine, request.sent_at = resident.engine, now
        self._at_engines[request.id] = request
        self._order += 1
        forecast = request.prompt_tokens + min(request.most_new_tokens, self.counters[request.model].forecast.tokens)
        request.kv_bytes = forecast * self._kv_bytes_per_token(resident)
        self._protection.started(request.model, request.id, self._tpot_s(request))
        STARTED.labels(request.model, start.why.value).inc()
        if request.trace is not None:
            request.trace.sent(now, start.why.value, resident)
        return resident.engine, request.generate(self._order)

    def _tell_engines(self) -> None:
        """Writes each engine's prefill throttle to the shared board."""
        if not self._rules.experiments.protect_decodes:
            return
        now = self._now()
        self._protection.prefills({waiting.model for waiting in self._backlog.in_flight()}, now)
        for model, pace in self._protection.paces(
            self._backlog.pressed, self._backlog.late_models(), partial(self._backlog.late_by_pauses, now=now)
        ).items():
            self._backlog.model_paced(model, pace.slowdown, pace.chunk_tokens, now)
            resident = self._residents.get(model)
            if resident is not None and resident.engine is not None:
                self._set_pace(resident.engine.index, pace)

    def _set_pace(self, index: int, pace: PrefillThrottle) -> None:
        if self._paces.get(index, FREE) != pace:
            self._paces[index] = pace
            self._board.set_throttle(index, pace)

    def _tpot_s(self, request: GroupRequest) -> float:
        return (request.tpot_ms or self._rules.default_tpot_ms) / 1e3

    @staticmethod
    def _kv_bytes_per_token(resident: Resident) -> int:
        """KV bytes per token of the model on each device."""
        spec = resident.spec
        return int(resident.measured.kv_bytes_per_token or share(spec.kv_bytes_per_token, spec) or 1)

    def _places(self, active: Mapping[str, Resident]) -> dict[str, int]:
        """How many more requests each engine can run, by model; models whose engines gave no bound are left out."""
        running = Counter(id(request.engine) for request in self._at_engines.values())
        most = {name: (resident.measured.most_running, id(resident.engine)) for name, resident in active.items()}
        return {name: count - running[engine] for name, (count, engine) in most.items() if count}

    def _committed(self) -> dict[str, int]:
        committed: defaultdict[str, int] = defaultdict(int)
        for request in self._at_engines.values():
            committed[request.model] += request.kv_bytes
        return committed

    # --- reports

    def queue_state(self) -> gpu_scheduler_pb2.QueueState:
        """The queue as the last plan left it."""
        now = self._now()
        state = gpu_scheduler_pb2.QueueState()
        agenda = self._agenda
        places = {request_id: f"on time {i + 1}" for i, request_id in enumerate(agenda.on_time)}
        places |= {request_id: f"second {i + 1}" for i, request_id in enumerate(agenda.second)}
        state.busy_s = max(0.0, agenda.start - now)
        for request in self._requests.values():
            resident = self._residents.get(request.model)
            waking = resident is None or resident.residency != common_pb2.ACTIVE
            place = "running" if request.engine is not None else places.get(request.id, "waiting")
            state.requests.add(
                request_id=request.gateway_id,
                model=request.model,
                waiting_s=now - request.arrival,
                slack_s=self._backlog.slack(request.id, now),
                cost_s=self._backlog.prefill_cost(request.id),
                place=place + (", model waking" if waking and request.engine is None else ""),
            )
        return state

    def demand(self) -> dict[str, float]:
        """The demand w (`policy/memory/demand.py`) of every resident model."""
        now = self._now()
        return {
            resident.spec.name: weight(
                self.counters[resident.spec.name].rate.rate(now),
                self._kv_bytes_per_token(resident),
                self.counters[resident.spec.name].tpot_ms or resident.spec.default_slo.tpot_ms,
            )
            for resident in self._residents
        }

    def count(self, model: str) -> tuple[int, int, int]:
        """(waiting, running, late among the waiting) requests of a model; late by the last plan. It looks at no
        request, because it is called for every model many times a second."""
        waiting, late = self._backlog.waiting_of(model)
        return waiting, self._of_models[model] - waiting, late

    def work_of(self, engine: EngineProcess) -> tuple[int, float]:
        """(number of the engine's requests, expected seconds of prefill of those that have no token yet)."""
        its = [request for request in self._at_engines.values() if request.engine is engine]
        prompts = [request.id for request in its if self._backlog.state(request.id) is RequestState.DISPATCHED]
        return len(its), sum(map(self._backlog.prefill_cost, prompts))

    def all_requests(self) -> int:
        """Number of requests of all models that wait or run."""
        return len(self._requests)

    def lacking_bytes(self, model: str) -> int:
        """KV bytes on each device that the model's waiting requests lack; 0: none."""
        return self._kv_shortages.of(model, self._now())

    def idle_s(self, model: str) -> float:
        """Seconds since the model's last request arrived or ended; 0 while one is here."""
        return 0.0 if model in self._of_models else self._now() - self.counters[model].last_event
