"""Which of the ordered requests may start now, given memory and the prefill limits.

`Backlog.plan` splits the waiting requests into S, the on-time set by deadline, and the second queue: late and
best-effort requests, oldest first. They are tried in this order: the oldest of the second queue, while its ageing
credit covers them; then requests of the second queue that fit into the slack that S leaves; then S by deadline. Before
all of these go short prompts that would be late only because they wait for the turn of a long one, and would be on time
with a share of the devices. Four things keep a request from starting:

- *Its model is not active.* The request stays in the plan and is looked at again when the model is active.
- *The prefill turn.* While prompts are being prefilled, more may join if all of them together take no more than
  `joint_s`, or, if they are all of one model, until one chunk is full: short prefills of several engines run side by
  side, a long one has the device to itself. Only the next request in order may join, so that the turn passes on when
  the prefills in flight end. The chunk bound alone would be too little for models whose chunk takes a few milliseconds:
  an engine reports a prompt as finished once the following step is launched, so a request that waits for the report
  misses that step, and is too late to fill the one after it. Between two prefills in sequence the next engine has to
  read the message and to end a step, which takes longer than a short prefill: two 8B engines with prompts of 256 tokens
  had mean TTFTs of 74 to 80 ms one at a time, and 46 side by side, with 4 to 6 % more TPOT (docs/lab/tuning.md).
- *Memory.* A request starts only if the pages of its prompt and of its forecast output can be granted. If not, a
  `NeedMemory` asks for a limit to be moved. A request of S that lacks memory is passed over and keeps its claim: no
  later request of its model starts before it, and the free bytes of its devices are not given to requests after it. An
  aged request claims only its own model's memory, so that it cannot hold up other models' requests in S.
- *A slot.* An engine runs a limited number of requests at a time; any more would wait in the engine in the order in
  which they were sent, late ones before those that can still be on time.

Byte counts are per device of the model: a tensor-parallel model holds the same on all of its devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

from gpu_scheduler.policy.queue.backlog import Backlog
from gpu_scheduler.policy.queue.decisions import NeedMemory, QueuePlan, Start, StartRule
from gpu_scheduler.policy.queue.slack import WaitingRequest
from kv_kinds.layout import KvLayout, of_tokens

CANDIDATES = 64
"""Requests of the second queue tried per pass for the slack of S, and requests tried per pass to start beside the
current prefills. Bounds the cost of one pass, not the queue."""
_LOOKED_AT = 512
"""Late requests looked at per pass to start beside the current prefills: models that are not active may have
thousands."""


@dataclass(frozen=True, slots=True)
class ModelKv:
    """KV memory of one active model, in bytes on each of its devices."""

    limit: int
    held: int
    """Bytes that only this model can use: those of its running requests, and `reclaimable`."""
    reclaimable: int = 0
    """Bytes of `held` that no running request uses and that only a new request of this model may take."""
    growth: int = 0
    """Bytes beyond `held` that started requests are still expected to take, those in prefill included."""
    kv: KvLayout = of_tokens(1)
    """The kinds of KV that a request needs on one device."""
    devices: tuple[str, ...] = ()

    def bytes_for(self, request: WaitingRequest) -> int:
        """Bytes for the prompt and the forecast output of `request`. A cached prefix counts in full: while no request
        uses it, it is counted as free too."""
        return self.kv.bytes_of(request.prompt_tokens + request.decode_tokens)


@dataclass(frozen=True, slots=True)
class AdmissionMemory:
    """Memory that admission can grant: each active model's, and by device the bytes that no lease holds (a device that
    is not named is bound by the limits alone)."""

    models: Mapping[str, ModelKv]
    free: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """How much prefill work may be under way at once."""

    chunk_tokens: int = 8192
    """Prompt tokens left to prefill below which more prefills of the same model may join those in flight."""
    slack_share: float = 0.1
    """Share of S's slack that the second queue may use. Costs are estimates, and the next arrival may have little
    slack: under overload every larger share makes more of the arriving requests late. A late request still goes before
    S where S has minutes of slack."""
    joint_s: float = 0.0
    """Most seconds of prefill, measured alone, that may be in flight together with a request that joins. For a request
    that only waiting would make late, the prefills of the engine with the most are not counted. 0: one engine prefills
    at a time, at most a chunk; +inf: every request that has memory starts."""


def admit(
    queue_plan: QueuePlan,
    backlog: Backlog,
    memory: AdmissionMemory,
    limits: PrefillLimits,
    places: Mapping[str, int] | None = None,
) -> list[Start | NeedMemory]:
    """The requests to start, in order, and the memory that requests before them lack (at most one `NeedMemory` per
    model). `places`: by model, how many more requests its engine can run; an unnamed model has no bound.

    Reads `backlog` and changes nothing; the plan must be of its present state. Raises KeyError if `memory` lacks an
    active model.
    """
    admission = _Admission(queue_plan, backlog, memory, limits, places or {})
    admission.beside()
    if admission.aged():
        admission.within_slack()
        admission.on_time()
    return admission.decisions


class _Grantable:
    """Bytes that can still be granted in this pass, by model and by device."""

    def __init__(self, memory: AdmissionMemory) -> None:
        self._models = memory.models
        self._free = dict(memory.free)
        self._left = {name: m.limit - m.held + m.reclaimable - m.growth for name, m in memory.models.items()}
        self._reclaimable = {name: m.reclaimable for name, m in memory.models.items()}
        for name, model in memory.models.items():
            self._use(name, model.growth)

    def copy(self) -> _Grantable:
        other = copy(self)
        other._free, other._left, other._reclaimable = dict(self._free), dict(self._left), dict(self._reclaimable)
        return other

    def wants(self, request: WaitingRequest) -> int:
        """Bytes on each of the model's devices that `request` needs beyond the model's reclaimable bytes."""
        return max(0, self._models[request.model].bytes_for(request) - self._reclaimable[request.model])

    def lacks(self, request: WaitingRequest) -> int:
        """Most bytes missing on any device of the model, its limit included; 0 if the request can be granted."""
        need = self._models[request.model].bytes_for(request)
        return max(need - self._left[request.model], self.lacks_on_devices(request))

    def lacks_on_devices(self, request: WaitingRequest) -> int:
        """Most bytes missing on any device of the model if the model had no limit."""
        new, devices = self.wants(request), self._models[request.model].devices
        return max([0, *(new - self._free[device] for device in devices if device in self._free)])

    def take(self, request: WaitingRequest) -> None:
        """Grants the request's memory."""
        need = self._models[request.model].bytes_for(request)
        self._left[request.model] -= need
        self._use(request.model, need)

    def claim(self, request: WaitingRequest) -> None:
        """Keeps the free bytes of the request's devices from later requests; its own model is passed over as a whole
        anyway."""
        self._use(request.model, self._models[request.model].bytes_for(request))

    def _use(self, name: str, need: int) -> None:
        old = min(need, self._reclaimable[name])
        self._reclaimable[name] -= old
        for device in self._models[name].devices:
            if device in self._free:
                self._free[device] = max(0, self._free[device] - (need - old))


class _Admission:
    """One pass over a plan; collects `decisions`."""

    def __init__(
        self,
        queue_plan: QueuePlan,
        backlog: Backlog,
        memory: AdmissionMemory,
        limits: PrefillLimits,
        places: Mapping[str, int],
    ) -> None:
        self.decisions: list[Start | NeedMemory] = []
        self._places = dict(places)
        self._queue_plan = queue_plan
        self._backlog = backlog
        self._limits = limits
        in_flight = backlog.in_flight()
        self._books = _Grantable(memory)
        self._holders = {request.model for request in in_flight}
        self._tokens = backlog.tokens_in_flight()
        self._seconds = queue_plan.start - queue_plan.now
        self._unfinished = backlog.seconds_in_flight()
        """Seconds of prefill left by model. Elapsed time does not reduce it: an engine that reports no progress gets no
        more."""
        self._of_second = Counter(backlog.waiting_by_model())
        """Requests of the second queue by model."""
        self._of_second.subtract(queue_plan.of_s)
        self._started: set[str] = set()
        self._passed_over: set[str] = set()

    def beside(self) -> None:
        """Starts requests that only waiting for the turn would make late, beside the prefills that have it, if that
        makes neither the started request nor S late. Engines that prefill at once share the devices in equal parts."""
        if not self._holders or not self._queue_plan.left_out or not 0 < self._limits.joint_s < inf:
            return
        now = self._queue_plan.now
        most = min(self._queue_plan.slack, self._backlog.slack_in_flight(now))
        beside = sum(self._unfinished.values()) - max(self._unfinished.values())
        books: _Grantable | None = None
        dropped = islice(self._queue_plan.left_out, _LOOKED_AT)
        # Models that are prefilling are left out: their own engines would run the request behind their current
        # prefills.
        for request in islice(self._able(dropped, self._queue_plan.left_out_by_model, self._holders), CANDIDATES):
            cost = self._backlog.prefill_cost(request.request_id)
            shared = sum(min(cost, seconds) for seconds in self._unfinished.values())
            slack = request.deadline - (now + shared + cost)
            if slack < 0 or cost > most or beside + cost > self._limits.joint_s:
                continue
            if self._places.get(request.model, inf) <= self._queue_plan.of_s.get(request.model, 0):
                continue
            books = books or self._books_for_others()
            if not books.lacks(request):
                books.take(request)
                self._start(request, StartRule.BESIDE)
                most = min(most - cost, slack)
                beside += cost

    def _books_for_others(self) -> _Grantable:
        """The memory left once the next requests in order have theirs: S, and the oldest request of the second queue
        that cannot be made on time by hurrying."""
        books, now = self._books.copy(), self._queue_plan.now
        oldest = islice(self._able(self._queue_plan.second, self._of_second), CANDIDATES)
        patient = islice((request for request in oldest if not now < request.deadline < inf), 1)
        on_time = islice(self._able(self._queue_plan.on_time, self._queue_plan.of_s), CANDIDATES)
        for request in chain(patient, on_time):
            books.take(request)
        return books

    def aged(self) -> bool:
        """Starts the oldest of the second queue while the ageing credit covers them. False if one of these has to wait
        for the turn: it is the next to start."""
        credit = self._queue_plan.credit
        for request in self._able(self._queue_plan.second, self._of_second):
            cost = self._backlog.prefill_cost(request.request_id)
            if cost > credit:
                break
            if lacking := self._books.lacks(request):
                self._pass_over(request, lacking, inf)
            elif self._may_prefill(request):
                self._start(request, StartRule.AGED)
                credit -= cost
            else:
                return False
        return True

    def within_slack(self) -> None:
        """Starts requests of the second queue that delay nothing in S past its deadline. One that lacks memory claims
        none of S's, and engines' slots go to S first."""
        left = self._queue_plan.slack * self._limits.slack_share
        if left <= 0 or left < self._queue_plan.least:
            return
        lacks: set[str] = set()
        tries = CANDIDATES
        for request in self._able(self._queue_plan.second, self._of_second, lacks):
            if tries == 0:
                break
            tries -= 1
            cost = self._backlog.prefill_cost(request.request_id)
            if cost > left or self._places.get(request.model, inf) <= self._queue_plan.of_s.get(request.model, 0):
                continue
            if lacking := self._books.lacks(request):
                lacks.add(request.model)
                if not self._queue_plan.on_time:
                    self._pass_over(request, lacking, inf)
            elif self._may_prefill(request):
                self._start(request, StartRule.SLACK)
                left -= cost
            else:
                break

    def on_time(self) -> None:
        """Starts the requests of S in order of deadline."""
        for request in self._able(self._queue_plan.on_time, self._queue_plan.of_s):
            if lacking := self._books.lacks(request):
                self._pass_over(request, lacking, self._backlog.slack(request.request_id, self._queue_plan.now))
                self._books.claim(request)
            elif self._may_prefill(request):
                self._start(request, StartRule.ON_TIME)
            else:
                break

    def _able(
        self, request_ids: Iterable[str], counts: Mapping[str, int], without: Collection[str] = ()
    ) -> Iterator[WaitingRequest]:
        """Yields the requests of active models that no earlier request of their model holds back and whose models are
        not in `without` at that moment. `counts`: requests by model; the walk ends after the last that could start,
        because behind a model that lacks memory a thousand of its own may wait."""
        left = {name: count for name, count in counts.items() if count and self._backlog.is_active(name)}
        for request_id in request_ids:
            if not left:
                return
            request = self._backlog.request(request_id)
            name = request.model
            if name not in left:
                continue
            if name in self._passed_over or name in without or self._places.get(name, 1) <= 0:
                del left[name]
                continue
            left[name] -= 1
            if not left[name]:
                del left[name]
            if request_id not in self._started:
                yield request

    def _may_prefill(self, request: WaitingRequest) -> bool:
        if not self._holders or self._limits.joint_s == inf:
            return True
        if self._holders == {request.model} and self._tokens < self._limits.chunk_tokens:
            return True
        cost = self._backlog.prefill_cost(request.request_id)
        of_model = self._unfinished.get(request.model, 0.0)
        return of_model + cost <= self._limits.joint_s and self._seconds + cost <= self._limits.joint_s

    def _start(self, request: WaitingRequest, why: StartRule) -> None:
        self._books.take(request)
        if request.model in self._places:
            self._places[request.model] -= 1
        self._holders.add(request.model)
        self._tokens += request.uncached_tokens
        cost = self._backlog.prefill_cost(request.request_id)
        self._seconds += cost
        self._unfinished[request.model] = self._unfinished.get(request.model, 0.0) + cost
        self._started.add(request.request_id)
        self.decisions.append(Start(request.request_id, why))

    def _pass_over(self, request: WaitingRequest, lacking: int, slack: float) -> None:
        self._passed_over.add(request.model)
        wanted, on_devices = max(lacking, self._books.wants(request)), self._books.lacks_on_devices(request)
        self.decisions.append(NeedMemory(request.model, wanted, request.request_id, slack, on_devices))
