"""The shared queue: every request of every model of a group, those that wait for their prefill and those under way.

A request is in exactly one state, from `add` until `finish`, `cancel`, or a decision that throws it away. S is the set
of requests that the last plan expects to be on time. A request that waits is LATE if it can no longer be on time or is
not in S:

    WAITING      not sent to an engine: in S, without a deadline, or not planned yet
    LATE         not sent to an engine, and late
    DISPATCHED   sent to an engine, prefill not finished
    RUNNING      prefill finished, decoding; kept so that a retraction can put it back

    add: -> WAITING <-> LATE                      start: WAITING | LATE -> DISPATCHED
    prefill_finished: DISPATCHED -> RUNNING       requeue: DISPATCHED | RUNNING -> WAITING (arrival kept)
    finish, cancel: any -> gone                   Drop, Expire: WAITING | LATE -> gone

`plan(now)` throws away expired requests, runs Moore-Hodgson over all waiting requests that have a deadline, and returns
a `QueuePlan` with S; `admission.admit` turns that into starts. Run both when a request
arrives or is cancelled, a prefill makes progress or ends, memory or a residency changes, or at `next_deadline()`;
nothing else changes the answer.

**The second queue** is an order that each plan makes of the requests that are not in S: those that Moore-Hodgson left
out (*late*, thrown away only if their clients ask for that) and best effort, oldest first. A best-effort request is
ordered as if it had come `best_effort_yield_s` later: late requests that came up to that long after it still go first.
A request of the second queue starts in one of two ways: in the *slack* that S as a whole has (unbounded while S is
empty), or on *credit*, which grows while the second queue waits and bounds its starvation (`ageing.py` states the
bound).

A request of a waking model counts as late if `now + rest of the wake-up + prefill` passes its deadline. The sum of the
prefills of S leaves wake-ups out, because a wake-up does not occupy the prefill turn. Charged to each of the requests
that wait for it, one wake-up would count many times, and requests would be left out of S needlessly.

Not thread-safe. Times are seconds on the caller's clock; a `now` earlier than the last counts as the last.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import Literal

import numpy as np

from gpu_scheduler.policy.queue import slack
from gpu_scheduler.policy.queue.ageing import Ageing
from gpu_scheduler.policy.queue.decisions import Drop, Expire, QueuePlan, Start, StartRule
from gpu_scheduler.policy.queue.models import QueuedModels
from gpu_scheduler.policy.queue.moore_hodgson import ends, late_indices
from gpu_scheduler.policy.queue.request_columns import Array, Classes
from gpu_scheduler.policy.queue.service_time import ServiceTime
from gpu_scheduler.policy.queue.slack import PrefillSpeed, WaitingRequest
from gpu_scheduler.policy.queue.wait_queues import Order, QueueEntry, WaitQueues
from gpu_scheduler.policy.queue.wait_queues import RequestState as RequestState

TICK = 0.001
"""Seconds after a deadline at which `next_deadline` wakes the caller: at the deadline itself nothing is late yet."""
PRESSED_S = 1.0
"""Seconds for which one plan that found a request late for want of speed keeps `pressed` true: without the throttle's
pauses the next plan may leave nothing out."""
_PRESSING = 64
"""Requests left out of S that one plan looks at to set `pressed`."""
_LEAST_STEP_S = 0.01
"""Least seconds of one prefill step: launching it takes 6 to 17 ms on an H200. A rarely used model's speed was learned
from long prompts, which may underestimate short ones by a factor of fifty."""


@dataclass(frozen=True, slots=True)
class BacklogRules:
    """The order of the queue, and the parameters of the second queue."""

    order: Literal["moore_hodgson", "arrival"] = "moore_hodgson"
    """With "arrival", deadlines do not order anything: every request counts as best effort, so that each model's
    requests start first come, first served, and none takes memory from running requests."""
    late_share: float = 0.05
    """Largest share of the prefill time that the second queue takes while S is never empty. Under overload S loses this
    share. A late request may have to wait for its cost divided by it."""
    best_effort_yield_s: float = 10.0
    """Seconds by which a best-effort request lets late ones go first."""


class Backlog:
    """The shared queue. Unknown request ids and models raise KeyError, a call that the request's state forbids
    ValueError."""

    def __init__(self, rules: BacklogRules | None = None) -> None:
        self.rules = rules or BacklogRules()
        self._models = QueuedModels()
        self._entries: dict[str, QueueEntry] = {}
        self._queues = WaitQueues()
        self._late_of: dict[str, int] = {}
        """Late requests by model, those whose deadlines have passed included."""
        self.pressed = False
        """True if within the last `PRESSED_S` a plan left out a request that could be on time if prefills were not
        throttled."""
        self._pressed_until = -inf
        self._in_flight: dict[str, QueueEntry] = {}
        self._service = ServiceTime()
        self._busy_until = -inf
        self._expiries: list[tuple[float, str]] = []
        self._droppable = 0
        self._next_seq = 0
        self._ageing = Ageing(self.rules.late_share)
        self._wake_at = inf
        self._by_arrival = self.rules.order == "arrival"
        self._ended: dict[str, list[tuple[int, float, float]]] = {}
        """Prompts that ended since the last plan, by model: (tokens, seconds, slowdown by the throttle)."""

    def __repr__(self) -> str:
        return (
            f"Backlog(waiting={len(self._queues)}, late={self._queues.late}, "
            f"in_flight={len(self._in_flight)}, all={len(self)}, {self._ageing!r})"
        )

    def __len__(self) -> int:
        """Requests in any state."""
        return len(self._entries)

    # --- models -------------------------------------------------------------------------------------------------------

    def add_model(self, model: str, speed: PrefillSpeed) -> None:
        """Adds a model that is not active yet. The caller keeps `speed` and feeds it observations; the queue reads
        it."""
        self._models.add(model, speed)

    def remove_model(self, model: str) -> None:
        """Removes a model. Raises ValueError while it has requests here."""
        self._models.remove(model)
        self._ended.pop(model, None)

    def model_active(self, model: str) -> None:
        """The model is active: its requests may start from now on."""
        known = self._models[model]
        known.active, known.ready_at = True, -inf

    def model_waking(self, model: str, ready_at: float) -> None:
        """The model is not active. `ready_at`: when it is expected to be, also if its wake-up has not begun; +inf: not
        in sight, so that every request of it with a deadline is late."""
        known = self._models[model]
        known.active, known.ready_at = False, ready_at

    def model_throttled(self, model: str, slowdown: float, step_tokens: int, now: float) -> None:
        """From now on the model's prefills of more than `step_tokens` take `slowdown` times as long as its speed says
        (`throttle.py`)."""
        known = self._models[model]
        if (known.slowdown, known.step_tokens) == (slowdown, step_tokens):
            return
        before = sum(self.seconds_in_flight().values())
        known.slowdown, known.step_tokens = slowdown, step_tokens
        if before > 0 and self._busy_until > now:
            # The rest of the turn is scaled in proportion: engines have reported nothing of the steps that are under
            # way.
            self._busy_until = now + (self._busy_until - now) * sum(self.seconds_in_flight().values()) / before

    def observe(self, model: str, tokens: int, seconds: float) -> None:
        """Records that a prompt of `tokens` uncached tokens took `seconds`, or 0 if it ended in the same step as
        another prompt. The next plan learns from it: prompts that ended by then count as one batch, its time divided
        among them by their costs alone."""
        self._ended.setdefault(model, []).append((tokens, seconds, self._models[model].stretched(tokens)))

    def _learn(self) -> None:
        for model, ended in self._ended.items():
            speed = self._models[model].speed
            # The time that the throttle's pauses added is no property of the model.
            _, _, slowdown = max(ended)
            took_s = sum(seconds for _, seconds, _ in ended) / slowdown
            costs = {speed.bucket(tokens): (tokens, speed.cost(tokens)) for tokens, *_ in ended}
            part = took_s / sum(speed.cost(tokens) for tokens, *_ in ended)
            for tokens, cost in costs.values():
                speed.observe(tokens, part * cost)
        self._ended.clear()

    def is_active(self, model: str) -> bool:
        """Whether requests of the model may start."""
        return self._models[model].active

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: WaitingRequest, now: float) -> None:
        """Adds a new request, or one replayed from another group with the arrival time that it had there. Raises
        ValueError if its id is queued already."""
        if request.request_id in self._entries:
            raise ValueError(f"request {request.request_id} is queued already")
        model = self._models[request.model]
        self._account(now)
        if self._by_arrival:
            request = replace(request, deadline=inf, drop_late=False)
        entry = QueueEntry(request, self._next_seq)
        self._next_seq += 1
        self._entries[request.request_id] = entry
        model.requests += 1
        self._enqueue(entry)

    def start(self, decision: Start, now: float) -> WaitingRequest:
        """Marks the request as sent to its engine; it counts as dispatched work until its prefill has finished."""
        entry = self._in_state(decision.request_id, RequestState.WAITING)
        self._account(now)
        cost = self._cost(entry)
        if decision.why is StartRule.AGED:
            self._ageing.pay(cost)
        self._dequeue(entry)
        entry.state, entry.done_tokens = RequestState.DISPATCHED, 0
        self._busy_until = max(self._busy_until, now) + cost
        self._in_flight[decision.request_id] = entry
        self._service.begin(decision.request_id, entry.request.model, now)
        return entry.request

    def progress(self, request_id: str, now: float, *, computed_tokens: int, cached_tokens: int = 0) -> None:
        """Records that the engine found `cached_tokens` of the prompt in a cached prefix, and has computed
        `computed_tokens` of the rest."""
        entry = self._in_state(request_id, RequestState.DISPATCHED)
        entry.request = replace(entry.request, cached_tokens=cached_tokens)
        entry.done_tokens = computed_tokens
        self._recount(now)

    def prefill_finished(self, request_id: str, now: float) -> float:
        """Records that the request's first token is out. Returns the seconds that its prefill would have taken alone
        (`service_time`)."""
        entry = self._in_state(request_id, RequestState.DISPATCHED)
        self._account(now)
        entry.state = RequestState.RUNNING
        seconds = self._service.end(request_id, now)
        known = self._models[entry.request.model]
        known.prefilled_at, known.prefilled_s = now, max(seconds, known.prefilled_s if now == known.prefilled_at else 0)
        self._land(request_id, now)
        return seconds

    def requeue(
        self,
        request_id: str,
        now: float,
        *,
        prompt_tokens: int | None = None,
        deadline: float | None = None,
        drop_late: bool | None = None,
    ) -> None:
        """Puts a request that was retracted, or whose engine died, back into the queue with the arrival time that it
        had.

        `prompt_tokens` then includes the tokens generated so far. `deadline` replaces the old one, which has often
        passed: with it the request would wait behind all that can still be on time although its first token is out.
        `drop_late`: whether it is still thrown away if it is late.
        """
        entry = self._in_state(request_id, RequestState.DISPATCHED, RequestState.RUNNING)
        self._account(now)
        self._land(request_id, now)
        old = entry.request
        entry.request = replace(
            old,
            prompt_tokens=old.prompt_tokens if prompt_tokens is None else prompt_tokens,
            cached_tokens=0,
            deadline=old.deadline if deadline is None or self._by_arrival else deadline,
            drop_late=old.drop_late if drop_late is None else drop_late,
        )
        entry.state = RequestState.WAITING
        self._enqueue(entry)

    def cancel(self, request_id: str, now: float) -> bool:
        """Removes a request whose client went away. False if the request is not (or no longer) here: that is a race,
        not an error."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._account(now)
        self._forget(entry, now)
        return True

    def finish(self, request_id: str, now: float) -> bool:
        """Removes a request whose last token is out. The queue treats it as `cancel`; the two names tell a caller's
        reasons apart."""
        return self.cancel(request_id, now)

    def request(self, request_id: str) -> WaitingRequest:
        """The facts of a request as they are now."""
        return self._entries[request_id].request

    def state(self, request_id: str) -> RequestState | None:
        """The state of a request; None once it is gone."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        return RequestState.LATE if self._queues.is_late(entry) else entry.state

    def prefills(self, request_id: str) -> bool:
        """Whether the request is DISPATCHED: an engine has it, and its prefill has not finished."""
        return request_id in self._in_flight

    def waiting(self) -> Iterator[WaitingRequest]:
        """All waiting requests by deadline, best effort last; for inspection and for handing a queue over."""
        return self._queues.by_deadline()

    def waiting_by_model(self) -> dict[str, int]:
        """Waiting requests by model."""
        return self._models.waiting()

    def late_models(self) -> Collection[str]:
        """Models with waiting requests that are late by the last plan."""
        return [model for model, count in self._late_of.items() if count]

    def waiting_of(self, model: str) -> tuple[int, int]:
        """(waiting requests, those of them that are late by the last plan) of a model; zeros for an unknown model."""
        waiting = self._models.waiting_of(model)
        return waiting, min(waiting, self._late_of.get(model, 0))

    def in_flight(self) -> tuple[WaitingRequest, ...]:
        """Dispatched requests whose prefill has not finished, in order of dispatch."""
        return tuple(entry.request for entry in self._in_flight.values())

    def tokens_in_flight(self) -> int:
        """Prompt tokens that are dispatched and not prefilled."""
        return sum(entry.tokens_left for entry in self._in_flight.values())

    def seconds_in_flight(self) -> dict[str, float]:
        """Seconds of prefill left of the dispatched requests, by model, going by the progress that engines have
        reported."""
        seconds: dict[str, float] = {}
        for entry in self._in_flight.values():
            model = entry.request.model
            seconds[model] = seconds.get(model, 0.0) + self._left_s(entry)
        return seconds

    def slack_in_flight(self, now: float) -> float:
        """How many seconds another engine may prefill without making any on-time request in flight late; +inf: any
        number. Engines that prefill at once share the devices equally, and each runs its own requests one after the
        other."""
        of_model = self.seconds_in_flight()
        # A step reports nothing before it has ended: what it has done by now is estimated from the clock.
        part = max(0.0, self._busy_until - now) / (sum(of_model.values()) or 1.0)
        through: dict[str, float] = {}
        left = inf
        for entry in self._in_flight.values():
            request = entry.request
            own = through[request.model] = through.get(request.model, 0.0) + self._left_s(entry)
            ends = now + part * sum(min(own, seconds) for seconds in of_model.values())
            if ends <= request.deadline:
                left = min(left, request.deadline - ends)
        return left

    def seconds_before(self, deadline: float, now: float) -> float:
        """Seconds of prefill before that of a request that came now with this deadline: of prompts under way, and of
        those that wait and are due earlier; of all that wait if it has none (+inf). Late requests go after one that can
        be on time."""
        busy = max(0.0, self._busy_until - now) if self._in_flight else 0.0
        if not len(self._queues):
            return busy
        rates, queues = self._models.rates(), self._queues
        if deadline == inf:
            kinds = (queues.timed, queues.missed, queues.best_effort)
            return busy + sum(float(each.costs(rates).sum()) for each in kinds)
        return busy + queues.timed.costs_in_s(rates, deadline)

    def late_by_pauses(self, model: str, slowdown: float, now: float) -> bool:
        """Whether one of the model's on-time prompts in flight would be late if prefills took `slowdown` times as long
        as alone. The engine runs them one after the other, at worst in a step each, and the first may fall into the
        pause behind the last prompt before it."""
        known, alone = self._models[model], 0.0
        resting = max(0.0, known.prefilled_at + (slowdown - 1) * known.prefilled_s - now)
        for entry in self._in_flight.values():
            request = entry.request
            if request.model == model:
                cost = known.speed.cost(request.uncached_tokens)
                alone += max(_LEAST_STEP_S, cost * entry.tokens_left / request.uncached_tokens)
                if now <= request.deadline < now + resting + slowdown * alone:
                    return True
        return False

    def prefill_cost(self, request_id: str) -> float:
        """Seconds of the prefill turn that the request needs, without any wake-up."""
        return self._cost(self._entries[request_id])

    def slack(self, request_id: str, now: float) -> float:
        """Seconds until the request's latest start: deadline - e - now, with the rest of the model's wake-up in e."""
        request = self._entries[request_id].request
        model = self._models[request.model]
        e = slack.cost(request, model.speed, model.wake_rest(now), model.stretched(request.uncached_tokens))
        return slack.slack(request, e, now)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> QueuePlan:
        """Throws away expired and droppable requests, then orders those that wait. Takes 1 ms for 10,000 waiting
        requests, 4 ms if many are late."""
        self._account(now)
        self._learn()
        decisions: list[Drop | Expire] = list(self._expire(now))
        start = max(now, self._busy_until) if self._in_flight else now
        if not len(self._queues):
            return self._nothing_waits(now, start, tuple(decisions))
        rates = self._models.rates()

        just_missed = self._queues.miss(now, self._class_of)
        timed = self._queues.timed
        seqs, arrivals = timed.seqs(), timed.seconds()
        times, classes, costs = timed.times(), timed.classes(), timed.costs(rates)
        left_out = late_indices(times, self._hopeless_are_infinite(costs, times, classes, now), start)
        in_s = np.ones(len(timed), bool)
        in_s[left_out] = False
        timed.leave_out(~in_s)
        on_time = self._queues.in_order(seqs[in_s])
        of_s = self._models.counted(classes[in_s])
        slack = float((times[in_s] - ends(costs[in_s], start)).min()) if on_time else inf

        late = self._queues.in_order(seqs[left_out])
        self._press(now, late)
        stay = left_out
        if self._droppable and (drops := self._drop([*just_missed, *late.entries()], now)):
            decisions += drops
            stay = left_out[np.isin(seqs[left_out], timed.seqs())]
        left_out_by_model = self._models.counted(classes[stay])
        self._late_of = self._models.counted(np.concatenate((classes[stay], self._queues.missed.classes())))
        second = self._queues.by_age(seqs[stay], arrivals[stay], self.rules.best_effort_yield_s)

        least, most = inf, 0.0
        if second:
            of_missed, best_effort = self._queues.costs_of_missed(rates), self._queues.best_effort.costs(rates)
            of_second = np.concatenate((costs[left_out], of_missed, best_effort))
            least, most = float(of_second.min()), float(of_second.max())
        self._ageing.cap(most)
        self._wake_at = min(start + slack + TICK, self._credit_suffices(second, now))
        credit, thrown = self._ageing.seconds, tuple(decisions)
        return QueuePlan(now, start, on_time, second, slack, credit, thrown, least, of_s, late, left_out_by_model)

    def next_deadline(self) -> float:
        """When to call `plan` again if nothing else happens: at the next time-out, at the moment at which S, as last
        planned, could no longer be met, or when the second queue's credit suffices for its oldest request; +inf:
        never."""
        while self._expiries and not self._stands(*self._expiries[0]):
            heappop(self._expiries)
        return min(self._wake_at, self._expiries[0][0] if self._expiries else inf)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _nothing_waits(self, now: float, start: float, decisions: tuple[Drop | Expire, ...]) -> QueuePlan:
        self._late_of, self._wake_at = {}, inf
        nobody = self._queues.in_order(np.zeros(0, np.int64))
        self._press(now, nobody)
        self._ageing.cap(0.0)
        return QueuePlan(now, start, nobody, nobody, inf, self._ageing.seconds, decisions)

    def _in_state(self, request_id: str, *allowed: RequestState) -> QueueEntry:
        entry = self._entries[request_id]
        if entry.state not in allowed:
            expected = " or ".join(state.value for state in allowed)
            raise ValueError(f"request {request_id} is {entry.state.value}, not {expected}")
        return entry

    def _account(self, now: float) -> None:
        waiting = bool(self._queues.late or self._queues.best_effort)
        self._ageing.earn(now, waiting=waiting, busy=bool(self._in_flight))

    def _cost(self, entry: QueueEntry) -> float:
        return self._models[entry.request.model].prefill_cost(entry.request)

    def _left_s(self, entry: QueueEntry) -> float:
        """Seconds of prefill left of a dispatched request, going by the progress that its engine has reported."""
        return self._cost(entry) * entry.tokens_left / entry.request.uncached_tokens

    def _class_of(self, request: WaitingRequest) -> int:
        return self._models[request.model].class_of(request)

    def _enqueue(self, entry: QueueEntry) -> None:
        request = entry.request
        model = self._models[request.model]
        model.waiting += 1
        self._queues.insert(entry, model.class_of(request))
        self._droppable += request.drop_late
        if request.expires < inf:
            heappush(self._expiries, (request.expires, request.request_id))

    def _dequeue(self, entry: QueueEntry) -> None:
        self._models[entry.request.model].waiting -= 1
        self._queues.remove(entry)
        self._droppable -= entry.request.drop_late

    def _land(self, request_id: str, now: float) -> None:
        """Takes the request out of the dispatched work, if it is there."""
        if self._in_flight.pop(request_id, None) is not None:
            self._service.give_up(request_id, now)
            self._recount(now)

    def _recount(self, now: float) -> None:
        """Sets the time until which the turn is busy: now + what is not prefilled of the dispatched requests."""
        self._busy_until = now + sum(self.seconds_in_flight().values())

    def _forget(self, entry: QueueEntry, now: float) -> None:
        request = entry.request
        if entry.state is RequestState.WAITING:
            self._dequeue(entry)
        self._land(request.request_id, now)
        del self._entries[request.request_id]
        self._models[request.model].requests -= 1

    def _press(self, now: float, left_out: Order) -> None:
        for entry in islice(left_out.entries(), _PRESSING):
            request = entry.request
            model = self._models[request.model]
            alone_s = model.prefill_cost(request) / model.stretched(request.uncached_tokens)
            if model.active and now + alone_s <= request.deadline:
                self._pressed_until = now + PRESSED_S
                break
        self.pressed = now < self._pressed_until

    def _hopeless_are_infinite(self, costs: Array, times: Array, classes: Classes, now: float) -> Array:
        """The costs, with +inf (always late) for requests that their model's wake-up alone makes late."""
        ready = self._models.ready(now)
        if ready is None:
            return costs
        return np.where(ready[classes] + costs > times, inf, costs)

    def _credit_suffices(self, second: Order, now: float) -> float:
        """When the idle turn will have earned enough credit for the oldest request of the second queue that may
        start."""
        if not self._in_flight:
            for entry in second.entries():
                request = entry.request
                if (model := self._models[request.model]).active:
                    missing = model.prefill_cost(request) - self._ageing.seconds
                    return now + missing + TICK if missing > 0 else inf
        return inf

    def _stands(self, expires: float, request_id: str) -> bool:
        """Whether an item of the heap of time-outs still holds: the request waits, and has that time-out."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.state is RequestState.WAITING and entry.request.expires == expires

    def _expire(self, now: float) -> Iterator[Expire]:
        while self._expiries and self._expiries[0][0] <= now:
            expires, request_id = heappop(self._expiries)
            if self._stands(expires, request_id):
                entry = self._entries[request_id]
                self._forget(entry, now)
                yield Expire(request_id, f"its time-out passed after it had waited {now - entry.request.arrival:.3f} s")

    def _drop(self, late: list[QueueEntry], now: float) -> list[Drop]:
        """Throws away the late requests whose clients asked for that."""
        drops: list[Drop] = []
        for entry in late:
            if entry.request.drop_late:
                request_id = entry.request.request_id
                cost, left = self._cost(entry), self.slack(request_id, now)
                drops.append(Drop(request_id, f"late: {cost:.3f} s of prefill to do, {left:.3f} s of slack left"))
                self._forget(entry, now)
        return drops
