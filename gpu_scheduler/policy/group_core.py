"""The core of a group: the shared queue, admission, throttles and what is known of each model, joined.

Events go in: a request arrived, was retracted or ended; a model came up or left; an engine made a step or a first
token; memory was made free. `plan` gives decisions out, which are carried out in their order:

    Drop, Expire    end this request (the core has forgotten it already)
    NeedMemory      a request lacks memory
    RequestMemory   have memory made free; `memory_answered` is the answer
    SetThrottle     from now on this model's prefills are throttled so
    Start           send this request to its engine (the core counts it as sent); its engine knows the throttle by then

Make one plan for all events that come together, except `tokens` and `step_ended`, which need none; when memory has
changed; and at `next_plan_at()`. The core has no clock, no I/O and no engines: `gpu_scheduler/queue/dispatcher.py`
carries its decisions out on real ones, `sim/group/arbiter.py` on simulated ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nan

from gpu_scheduler.policy.group_facts import (
    RETURN_S,
    ArrivedRequest,
    GroupRules,
    ModelFacts,
    Presence,
    ServedModel,
)
from gpu_scheduler.policy.memory import holdings
from gpu_scheduler.policy.memory.demand import weight
from gpu_scheduler.policy.memory.forecast import OutputForecast
from gpu_scheduler.policy.memory.holdings import DeviceMemory
from gpu_scheduler.policy.memory.kv_shortage import KvShortages
from gpu_scheduler.policy.memory.request_backoff import MemoryRequestBackoff
from gpu_scheduler.policy.queue import admission
from gpu_scheduler.policy.queue.backlog import Backlog
from gpu_scheduler.policy.queue.decisions import Drop, Expire, NeedMemory, QueuePlan, RequestMemory, SetThrottle, Start
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest
from gpu_scheduler.policy.throttle.throttling import ThrottleController

Decision = Drop | Expire | NeedMemory | RequestMemory | SetThrottle | Start

RESUME_S = 1.0
"""Seconds until the deadline of an interrupted stream that goes on here. Its first token is out, in time or
not; what is left is its reader's patience. With this deadline it counts among the requests that can be on time."""
TOGETHER_S = 0.002
"""Seconds that a plan waits for more streams of a model that moved here: streams that start together go on after one
step, later ones after two."""
KEPT_MODELS = 64
"""Models that have left of which the speed of prefills and the length of answers are still remembered."""


@dataclass(slots=True)
class _Request:
    """A request from its arrival to its end."""

    model: str
    prompt_tokens: int
    most_new_tokens: int
    deadline: float
    """When its first token is due; +inf: it has no TTFT target."""
    tpot_s: float
    shown: bool
    """True once its first token is out, here or elsewhere."""
    generated: int = 0
    """Tokens that engines had generated when it was last retracted."""
    running: bool = False
    """True while an engine has it."""
    kv_bytes: int = 0
    """KV bytes on each device that it was admitted with; 0 while no engine has it."""
    named_tpot_s: float = 0.0
    """TPOT target that the request named; 0: none."""
    first_at: float = nan
    """When its first token came; NaN: not yet, or on another group."""


class GroupCore:
    """The requests and models of one group. Events of a request's end, and `prefilled`, ignore an id that is not known
    (any more); other methods raise KeyError."""

    def __init__(self, rules: GroupRules, now: float) -> None:
        self.backlog = Backlog(rules.backlog)
        self.shortages = KvShortages()
        self.queue_plan: QueuePlan = self.backlog.plan(now)
        """The result of the last plan."""
        self._rules = rules
        self._throttling = ThrottleController()
        self._models: dict[str, ServedModel] = {}
        self._active: dict[str, ServedModel] = {}
        self._left: dict[str, None] = {}
        """Models that are remembered but not here, in the order in which they left."""
        self._requests: dict[str, _Request] = {}
        self._memory_requests = MemoryRequestBackoff()
        self._together_at = inf
        """When streams that wait for others of their model are planned at the latest."""

    def __repr__(self) -> str:
        running = sum(model.running for model in self._models.values())
        return f"GroupCore({len(self._requests)} requests, {running} running, {[*self._active]} active)"

    def __len__(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    # --- models

    def model(self, name: str, now: float) -> ServedModel:
        """The record of a model, which is made if there is none yet."""
        model = self._models.get(name)
        if model is None:
            speed = PrefillSpeed(self._rules.prefill_tokens_per_s)
            model = self._models[name] = ServedModel(speed, OutputForecast(self._rules.forecast), now)
            self.backlog.add_model(name, speed)
            self.backlog.model_waking(name, now + self._rules.wake_s)
            self._throttling.measured(name, self._rules.prefill_tokens_per_s, 0.0)
        return model

    def model_changed(self, name: str, facts: ModelFacts, now: float) -> list[str]:
        """The model's residency changed. Returns the models that are forgotten: those that left longest ago, whose
        names may never come again."""
        model = self.model(name, now)
        model.facts = facts
        model.cold_s = facts.cold_s or model.cold_s
        model.throttle = None  # its next engine was told none
        self._left.pop(name, None)
        if facts.presence is Presence.ACTIVE:
            if facts.prefill_tokens_per_s > 0 and not self.backlog.is_active(name):
                chunk = facts.prefill_chunk_tokens or self._rules.limits.chunk_tokens
                model.speed.measured(chunk, chunk / facts.prefill_tokens_per_s)
                self._throttling.measured(name, facts.prefill_tokens_per_s, facts.decode_step_s)
            self.backlog.model_active(name)
            self._active[name] = model
            return []
        self._active.pop(name, None)
        # A model that went cold comes back as a new record.
        waking_s = facts.up_s or model.cold_s or self._rules.wake_s
        self.backlog.model_waking(name, now + waking_s if facts.presence is Presence.WAKING else inf)
        if facts.presence is not Presence.GONE:
            return []
        self._left[name] = None
        return self._forget_models()

    def _forget_models(self) -> list[str]:
        forgotten = [name for name in list(self._left)[:-KEPT_MODELS] if not self._models[name].requests]
        for name in forgotten:
            del self._left[name], self._models[name]
            self.backlog.remove_model(name)
            self._throttling.forget(name)
        return forgotten

    # --- requests

    def arrived(self, request: ArrivedRequest, now: float) -> None:
        """A request came to the group. Raises ValueError if its id is here already."""
        name, timed = request.model, request.deadline < inf
        model = self.model(name, now)
        waiting = WaitingRequest(
            request.id,
            name,
            request.arrival,
            now + RESUME_S if timed and request.resumed else request.deadline,
            request.prompt_tokens,
            request.cached_tokens,
            min(request.most_new_tokens, model.forecast.tokens),
            request.expires,
            request.drop_late and not request.resumed,
        )
        self.backlog.add(waiting, now)
        model.arrived += not request.resumed
        model.returns += not model.requests and now - model.last_event >= RETURN_S
        model.last_event = now
        model.tpot_s = request.tpot_s or model.tpot_s
        model.ttft_s = request.deadline - request.arrival if timed else model.ttft_s
        model.requests += 1
        self._requests[request.id] = _Request(
            name,
            request.prompt_tokens,
            request.most_new_tokens,
            request.deadline,
            request.tpot_s or self._rules.tpot_s,
            request.resumed,
            named_tpot_s=request.tpot_s,
        )
        if request.cached_tokens:
            self._together_at = min(self._together_at, now + TOGETHER_S)

    def ended(self, request_id: str, now: float, output_tokens: int = 0) -> None:
        """The request has finished, was cancelled, failed, or leaves for another group. `output_tokens`: tokens that it
        generated; 0: they say nothing about the length of the model's answers."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self.backlog.finish(request_id, now)
        model = self._off_engine(request_id, request)
        model.last_event = now
        model.requests -= 1
        if output_tokens:
            model.forecast.observe(output_tokens)
        if request.named_tpot_s and output_tokens > 1:
            model.tpot_missed += now - request.first_at > request.named_tpot_s * (output_tokens - 1)

    def retracted(self, request_id: str, now: float, prompt_tokens: int, most_new_tokens: int) -> None:
        """The engine had no memory for the request's next token, and gave it back. `prompt_tokens`: tokens to prefill
        before it goes on, those that it generated included."""
        request = self._requests[request_id]
        self._off_engine(request_id, request)
        request.generated += prompt_tokens - request.prompt_tokens
        request.prompt_tokens, request.most_new_tokens = prompt_tokens, most_new_tokens
        self.backlog.requeue(
            request_id,
            now,
            prompt_tokens=prompt_tokens,
            deadline=now + RESUME_S if request.deadline < inf else inf,
            # A request may be dropped only for the target of its first token.
            drop_late=False if request.shown else None,
        )

    def _off_engine(self, request_id: str, request: _Request) -> ServedModel:
        """The engine, if one had it, has the request no more."""
        model = self._models[request.model]
        model.committed -= request.kv_bytes
        model.running -= request.running
        request.kv_bytes, request.running = 0, False
        self._throttling.ended(request.model, request_id)
        return model

    # --- engines

    def prefilled(self, request_id: str, now: float, computed_tokens: int, cached_tokens: int = 0) -> bool:
        """The engine found `cached_tokens` of the prompt in a cached prefix, and has computed `computed_tokens` of the
        rest. False if that is old news: the request's first token is out, or no engine has it."""
        if not self.backlog.prefills(request_id):
            return False
        self.backlog.progress(request_id, now, computed_tokens=computed_tokens, cached_tokens=cached_tokens)
        return True

    def first_token(self, request_id: str, now: float, cached_tokens: int = 0) -> bool | None:
        """The request's prefill is over, of which `cached_tokens` were cached. Returns whether the request met its TTFT
        target; None if it has none, or had its first token before."""
        request = self._requests[request_id]
        model, name = self._models[request.model], request.model
        seconds = self.backlog.prefill_finished(request_id, now)
        model.rate.observe(request.prompt_tokens, now)
        self._throttling.decodes(name, request_id, request.tpot_s)
        self.backlog.observe(name, max(1, request.prompt_tokens - cached_tokens), seconds)
        if request.shown:
            return None
        request.shown = True
        request.first_at = now
        if request.deadline == inf:
            return None
        met = now <= request.deadline
        model.ttft_met += met
        model.ttft_missed += not met
        return met

    def step_ended(self, name: str, now: float, steps: int = 1) -> None:
        """The model's engine has made so many decode steps since the last call."""
        self._throttling.step(name, now, steps)

    def tokens(self, name: str, count: int, now: float) -> None:
        """The model's engine has generated so many tokens since the last call."""
        self._models[name].rate.observe(count, now)

    # --- memory

    def memory_answered(self, request: RequestMemory, granted: bool, now: float) -> None:
        """balloond has made the room, or could not."""
        self._memory_requests.answered(request.model, request.for_request, granted, now)

    # --- the plan

    def next_plan_at(self) -> float:
        """When to plan again if nothing else happens; +inf: never."""
        return min(self._together_at, self.backlog.next_deadline(), self._memory_requests.next_deadline())

    def plan(self, now: float, memory: Callable[[], Sequence[DeviceMemory]]) -> list[Decision]:
        """Decides anew about all that waits. `memory`: the devices of the group; it is called if a request could start,
        and without devices memory is unbounded."""
        self._together_at = inf
        self._memory_requests.expire(now)
        queue_plan = self.queue_plan = self.backlog.plan(now)
        for thrown in queue_plan.decisions:
            self.ended(thrown.request_id, now, self._requests[thrown.request_id].generated)
        starts: list[Start] = []
        needs: list[NeedMemory] = []
        if self._active and (queue_plan.on_time or queue_plan.second):
            for step in self._admit(queue_plan, memory()):
                if isinstance(step, Start):
                    self._start(step, now)
                    starts.append(step)
                else:
                    needs.append(step)
            self.shortages.look(needs, self.backlog.waiting_by_model(), now)
        else:
            self.shortages.look((), {}, now)
        requested = [
            RequestMemory(need.model, need.bytes, need.for_request)
            for need in needs
            if self._memory_requests.take(need, now)
        ]
        return [*queue_plan.decisions, *needs, *requested, *self._throttles(now), *starts]

    def _admit(self, queue_plan: QueuePlan, devices: Sequence[DeviceMemory]) -> list[Start | NeedMemory]:
        active = self._active
        memory = holdings.for_admission(
            devices,
            {name: model.facts.kv for name, model in active.items()},
            {name: model.committed for name, model in active.items()},
        )
        places = {
            name: model.facts.most_running - model.running for name, model in active.items() if model.facts.most_running
        }
        return admission.admit(queue_plan, self.backlog, memory, self._rules.limits, places)

    def _start(self, start: Start, now: float) -> None:
        request = self._requests[start.request_id]
        model = self._models[request.model]
        self.backlog.start(start, now)
        tokens = request.prompt_tokens + min(request.most_new_tokens, model.forecast.tokens)
        request.kv_bytes, request.running = model.facts.kv.bytes_of(tokens), True
        model.committed += request.kv_bytes
        model.running += 1
        self._throttling.started(request.model, start.request_id, request.tpot_s)

    def _throttles(self, now: float) -> Iterator[SetThrottle]:
        """The throttles that have changed since engines were last told."""
        if not self._rules.throttles:
            return
        backlog = self.backlog
        self._throttling.prefills({waiting.model for waiting in backlog.in_flight()}, now)
        late_by_pauses = partial(backlog.late_by_pauses, now=now)
        for name, throttle in self._throttling.throttles(
            backlog.pressed, backlog.late_models(), late_by_pauses
        ).items():
            model = self._models[name]
            if throttle != model.throttle:
                model.throttle = throttle
                backlog.model_throttled(name, throttle.slowdown, throttle.chunk_tokens, now)
                yield SetThrottle(name, throttle)

    # --- reports

    def waiting_of(self, name: str) -> list[str]:
        """Ids of the model's waiting requests, by deadline."""
        return [waiting.request_id for waiting in self.backlog.waiting() if waiting.model == name]

    def count(self, name: str) -> tuple[int, int, int]:
        """(waiting, running, late among the waiting) requests of a model; late by the last plan."""
        waiting, late = self.backlog.waiting_of(name)
        model = self._models.get(name)
        return waiting, model.running if model is not None else 0, late

    def outlook(self, name: str, now: float) -> tuple[float, float]:
        """(seconds of prefill before that of a request of the model that came now with its usual TTFT target, prompt
        tokens that the model prefills in a second)."""
        model = self.model(name, now)
        deadline = now + model.ttft_s if model.ttft_s else inf
        at_best = model.speed.seconds_per_token[model.speed.bucket(model.speed.chunk_tokens)]
        return self.backlog.seconds_before(deadline, now), 1 / at_best

    def work_of(self, name: str) -> tuple[int, float]:
        """(number of requests that the model's engine has, seconds of prefill of those that have no token yet)."""
        backlog = self.backlog
        prompts = [waiting.request_id for waiting in backlog.in_flight() if waiting.model == name]
        return self.count(name)[1], sum(map(backlog.prefill_cost, prompts))

    def demand(self, name: str, now: float, tpot_s: float = 0.0) -> float:
        """The demand w of a model (`memory/demand.py`). `tpot_s`: its TPOT target where no request has named one; 0:
        none."""
        model = self.model(name, now)
        return weight(model.rate.rate(now), model.facts.kv.demand_bytes, 1e3 * (model.tpot_s or tpot_s))

    def idle_s(self, name: str, now: float) -> float:
        """Seconds since the model's last request arrived or ended; 0 while one is here."""
        model = self.model(name, now)
        return 0.0 if model.requests else now - model.last_event
