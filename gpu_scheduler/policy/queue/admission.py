"""Which of the ordered requests may start now, given memory and the prefill turn.

The order is: the oldest of the second queue while its credit covers them, then what of the second queue fits into the
room that S leaves, then S by deadline. Before them all goes what the wait for the turn alone would make late and a
share of the devices would not: a short prompt beside a long one. Four things keep a request from starting:

- *Its model is not active.* It stays in the plan and is looked at again when the model is.
- *The turn.* While prompts are under way, more may join if all of them together take no more than `joint_s`, or until
  one chunk is full if they are all of one model: short prefills of several engines go side by side, a long one has the
  device for itself. Only who is next in order joins, so that the turn passes when the prefills in flight end. Of one
  model a chunk is too little where it takes a few milliseconds: an engine says that a prompt is through once the step
  behind it is launched, so who waits for that comes too late for that step, and too late to fill the one behind it.
  Between two that follow one another the next engine has to hear of it and to end a step, which is longer than a
  short prefill: two 8B engines with prompts of 256 tokens had mean TTFTs of 74 to 80 ms one at a time, and 46 side
  by side, with 4 to 6 % more TPOT (docs/lab/tuning.md).
- *Memory.* A request starts only if the pages of its prompt and of the forecast of its decode can be granted. If not, a
  `NeedMemory` asks for a limit to be moved. A request of S that lacks memory is passed over and keeps its claim: no
  later request of its model starts before it, and what its devices have free is not given to requests after it. An aged
  request claims its model's memory alone, so that it cannot hold up what other models have in S.
- *A place.* An engine runs so many requests at a time; whom it had beyond that would wait there in the order in which
  they were sent, late ones before those that can be on time.

Bytes are bytes on each device of the model: a tensor-parallel model holds the same on all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

from gpu_scheduler.policy.queue.backlog import Backlog
from gpu_scheduler.policy.queue.decisions import Agenda, NeedMemory, Start, Why
from gpu_scheduler.policy.queue.slack import WaitingRequest

CANDIDATES = 64
"""How many requests of the second queue are tried for the room in S at a time, and how many to start beside the turn:
bounds one admission, not the queue."""
_LOOKED_AT = 512
"""Of what was dropped, for the latter: models that are not active may have thousands."""


@dataclass(frozen=True, slots=True)
class ModelKv:
    """KV memory of one active model, on each of its devices."""

    limit: int
    held: int
    """Bytes that are its own: of running requests, and those of `reclaimable`."""
    reclaimable: int = 0
    """Bytes of `held` that nobody runs on and only a new request of this model may take."""
    growth: int = 0
    """Bytes beyond `held` that requests which were started are still expected to take, those in prefill included."""
    token_bytes: int = 1
    """Of one token on one device."""
    devices: tuple[str, ...] = ()

    def bytes_for(self, request: WaitingRequest) -> int:
        """What the prompt and the forecast of the decode take. A cached prefix counts in full: while nobody uses it,
        it counts as free too."""
        return (request.prompt_tokens + request.decode_tokens) * self.token_bytes


@dataclass(frozen=True, slots=True)
class AdmissionMemory:
    """What there is: each active model's, and the bytes that nobody leases on each device (a device not named here is
    bound by limits alone)."""

    models: Mapping[str, ModelKv]
    free: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """The prefill turn."""

    chunk_tokens: int = 8192
    """More prefills of the same model may join those in flight while these have fewer tokens left."""
    room_share: float = 0.1
    """Share of S's slack that the second queue may use. Costs are estimates and the next arrival may be tight: under
    overload every larger share makes more of those late that come. A late request still goes before S where S has
    minutes."""
    joint_s: float = 0.0
    """Seconds, alone, of all prefills in flight with one that joins them; of one that would be late if it did not, of
    all but the longest's engine. 0: one engine at a time, and of that a chunk; +inf: what has memory starts."""


def admit(
    agenda: Agenda,
    backlog: Backlog,
    memory: AdmissionMemory,
    turn: PrefillLimits,
    places: Mapping[str, int] | None = None,
) -> list[Start | NeedMemory]:
    """Starts, in order, and the memory that requests before them lack (at most one for each model). `places`: how many
    more requests the engine of a model can run; of one that is not named, any number.

    Reads `backlog` and changes nothing; the agenda must be of its present state. KeyError if `memory` lacks an active
    model.
    """
    admission = _Admission(agenda, backlog, memory, turn, places or {})
    admission.beside()
    if admission.aged():
        admission.within_room()
        admission.on_time()
    return admission.decisions


class _Books:
    """What can still be granted in this pass."""

    def __init__(self, memory: AdmissionMemory) -> None:
        self._models = memory.models
        self._free = dict(memory.free)
        self._left = {name: m.limit - m.held + m.reclaimable - m.growth for name, m in memory.models.items()}
        self._reclaimable = {name: m.reclaimable for name, m in memory.models.items()}
        for name, model in memory.models.items():
            self._use(name, model.growth)

    def copy(self) -> _Books:
        other = copy(self)
        other._free, other._left, other._reclaimable = dict(self._free), dict(self._left), dict(self._reclaimable)
        return other

    def wants(self, request: WaitingRequest) -> int:
        """Bytes of each device of its model that it needs beyond what the model has already."""
        return max(0, self._models[request.model].bytes_for(request) - self._reclaimable[request.model])

    def lacks(self, request: WaitingRequest) -> int:
        """Bytes that are missing on some device of its model; 0 if it can be granted."""
        need = self._models[request.model].bytes_for(request)
        return max(need - self._left[request.model], self.lacks_on_devices(request))

    def lacks_on_devices(self, request: WaitingRequest) -> int:
        """The same if it had no limit."""
        new, devices = self.wants(request), self._models[request.model].devices
        return max([0, *(new - self._free[device] for device in devices if device in self._free)])

    def take(self, request: WaitingRequest) -> None:
        """Grant it."""
        need = self._models[request.model].bytes_for(request)
        self._left[request.model] -= need
        self._use(request.model, need)

    def claim(self, request: WaitingRequest) -> None:
        """Keep from later requests what its devices have free; its own model is passed over as a whole anyway."""
        self._use(request.model, self._models[request.model].bytes_for(request))

    def _use(self, name: str, need: int) -> None:
        old = min(need, self._reclaimable[name])
        self._reclaimable[name] -= old
        for device in self._models[name].devices:
            if device in self._free:
                self._free[device] = max(0, self._free[device] - (need - old))


class _Admission:
    """One pass over an agenda."""

    def __init__(
        self, agenda: Agenda, backlog: Backlog, memory: AdmissionMemory, turn: PrefillLimits, places: Mapping[str, int]
    ) -> None:
        self.decisions: list[Start | NeedMemory] = []
        self._places = dict(places)
        self._agenda = agenda
        self._backlog = backlog
        self._turn = turn
        in_flight = backlog.in_flight()
        self._books = _Books(memory)
        self._holders = {request.model for request in in_flight}
        self._tokens = backlog.tokens_in_flight()
        self._seconds = agenda.start - agenda.now
        self._unfinished = backlog.seconds_in_flight()
        """Seconds by model, whatever time has passed: an engine that says nothing gets no more."""
        self._of_second = Counter(backlog.waiting_by_model())
        """Requests of the second queue by model."""
        self._of_second.subtract(agenda.of_s)
        self._started: set[str] = set()
        self._passed_over: set[str] = set()

    def beside(self) -> None:
        """Start what only the wait for the turn would make late, beside what has the turn, if neither that nor S gets
        late by it. Engines that prefill at once share the devices in equal parts."""
        if not self._holders or not self._agenda.dropped or not 0 < self._turn.joint_s < inf:
            return
        now = self._agenda.now
        room = min(self._agenda.room, self._backlog.slack_in_flight(now))
        beside = sum(self._unfinished.values()) - max(self._unfinished.values())
        books: _Books | None = None
        dropped = islice(self._agenda.dropped, _LOOKED_AT)
        # Not of the holders: their own engines would do it behind what they are at.
        for request in islice(self._able(dropped, self._agenda.of_dropped, self._holders), CANDIDATES):
            cost = self._backlog.prefill_cost(request.request_id)
            shared = sum(min(cost, seconds) for seconds in self._unfinished.values())
            slack = request.deadline - (now + shared + cost)
            if slack < 0 or cost > room or beside + cost > self._turn.joint_s:
                continue
            if self._places.get(request.model, inf) <= self._agenda.of_s.get(request.model, 0):
                continue
            books = books or self._books_for_others()
            if not books.lacks(request):
                books.take(request)
                self._start(request, Why.BESIDE)
                room = min(room - cost, slack)
                beside += cost

    def _books_for_others(self) -> _Books:
        """What is left when those have theirs that are next: S, and the oldest that no haste makes on time."""
        books, now = self._books.copy(), self._agenda.now
        oldest = islice(self._able(self._agenda.second, self._of_second), CANDIDATES)
        patient = islice((request for request in oldest if not now < request.deadline < inf), 1)
        on_time = islice(self._able(self._agenda.on_time, self._agenda.of_s), CANDIDATES)
        for request in chain(patient, on_time):
            books.take(request)
        return books

    def aged(self) -> bool:
        """Start what the second queue's credit covers. False if one of these has to wait for the turn: it is next."""
        credit = self._agenda.credit
        for request in self._able(self._agenda.second, self._of_second):
            cost = self._backlog.prefill_cost(request.request_id)
            if cost > credit:
                break
            if lacking := self._books.lacks(request):
                self._pass_over(request, lacking, inf)
            elif self._may_prefill(request):
                self._start(request, Why.AGED)
                credit -= cost
            else:
                return False
        return True

    def within_room(self) -> None:
        """Start what of the second queue delays nothing in S past its deadline. What lacks memory claims none from
        S, and places are S's first."""
        room = self._agenda.room * self._turn.room_share
        if room <= 0 or room < self._agenda.least:
            return
        lacks: set[str] = set()
        tries = CANDIDATES
        for request in self._able(self._agenda.second, self._of_second, lacks):
            if tries == 0:
                break
            tries -= 1
            cost = self._backlog.prefill_cost(request.request_id)
            if cost > room or self._places.get(request.model, inf) <= self._agenda.of_s.get(request.model, 0):
                continue
            if lacking := self._books.lacks(request):
                lacks.add(request.model)
                if not self._agenda.on_time:
                    self._pass_over(request, lacking, inf)
            elif self._may_prefill(request):
                self._start(request, Why.ROOM)
                room -= cost
            else:
                break

    def on_time(self) -> None:
        """Start S in order."""
        for request in self._able(self._agenda.on_time, self._agenda.of_s):
            if lacking := self._books.lacks(request):
                self._pass_over(request, lacking, self._backlog.slack(request.request_id, self._agenda.now))
                self._books.claim(request)
            elif self._may_prefill(request):
                self._start(request, Why.ON_TIME)
            else:
                break

    def _able(
        self, request_ids: Iterable[str], counts: Mapping[str, int], without: Collection[str] = ()
    ) -> Iterator[WaitingRequest]:
        """Requests of active models that nobody before them keeps from starting, and that are not in `without` by then.
        `counts`: how many there are of each model; with the last that could start it ends, as behind a model that
        lacks memory a thousand of its own may wait."""
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
        if not self._holders or self._turn.joint_s == inf:
            return True
        if self._holders == {request.model} and self._tokens < self._turn.chunk_tokens:
            return True
        cost = self._backlog.prefill_cost(request.request_id)
        of_model = self._unfinished.get(request.model, 0.0)
        return of_model + cost <= self._turn.joint_s and self._seconds + cost <= self._turn.joint_s

    def _start(self, request: WaitingRequest, why: Why) -> None:
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
