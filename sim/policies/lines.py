"""A queue for each model of a group, in front of its engine, for the systems that have no shared queue.

Each model's requests start in the order of its queue, whatever other models' requests wait for, as far as memory goes.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf, isnan

from gpu_scheduler.policy.memory.forecast import OutputForecast
from sim.engines.engine import SimulatedEngine
from sim.group.node import SimulatedGroup, SimulatedResident
from sim.inputs.request import SimulatedRequest

Order = Callable[[SimulatedRequest], float]
"""Key by which requests start: the least first; of equals the one that came first."""


def by_arrival(request: SimulatedRequest) -> float:
    return request.arrival


class EngineQueues:
    """The queues of a group. `bounded`: a request starts when its prompt and the forecast of its output fit beside what
    its model has started; otherwise at once, and the engine sees to its memory. `most_prefilling`: the most requests of
    a model that its engine has not prefilled yet."""

    prefill_priority_batch = 0
    prefill_priority_s = decode_arbitration_s = 0.0

    def __init__(
        self, group: SimulatedGroup, *, bounded: bool = True, order: Order = by_arrival, most_prefilling: float = inf
    ) -> None:
        self.group = group
        self._bounded = bounded
        self._order = order
        self._most_prefilling = most_prefilling
        self._came = count()
        self._lines: dict[str, list[tuple[float, int, SimulatedRequest]]] = {}
        """Model -> its waiting requests, as a heap."""
        self._places: dict[str, int] = {}
        """Request id -> its rank among requests of equal order."""
        self._committed: dict[str, int] = {}
        self._prefilling: dict[str, set[str]] = {}
        """Model -> ids of requests that its engine has and that have no token yet."""
        self._forecasts: dict[str, OutputForecast] = {}
        self._last_event: dict[str, float] = {}

    # --- requests (a Queue)

    def submit(self, request: SimulatedRequest) -> None:
        self._know(request.model)
        self._last_event[request.model] = self.group.clock.now
        self._places[request.id] = next(self._came)
        self._wait(request)
        self.start(request.model)

    def hand_back(self, name: str) -> list[SimulatedRequest]:
        gone = [request for _, _, request in sorted(self._lines.get(name, []))]
        self._lines[name] = []
        for request in gone:
            del self._places[request.id]
        return gone

    def forget(self, request: SimulatedRequest) -> None:
        self._last_event[request.model] = self.group.clock.now
        del self._places[request.id]
        self._left_engine(request)

    def residency_changed(self, resident: SimulatedResident) -> None:
        self._know(resident.spec.name)
        if resident.active:
            self.group.clock.after(0.0, self.start, resident.spec.name)

    def idle_s(self, name: str) -> float:
        """Seconds since the model's last request arrived or ended; 0 while one is here."""
        return 0.0 if self.outstanding(name) else self.group.clock.now - self._last_event.get(name, -inf)

    def outstanding(self, name: str) -> int:
        """Number of the model's requests that are here."""
        resident = self.group.residents.get(name)
        running = len(resident.engine.requests) if resident is not None and resident.engine is not None else 0
        return len(self._lines.get(name, ())) + running

    def waiting(self, name: str) -> list[SimulatedRequest]:
        """The model's requests that no engine has, in no order."""
        return [request for _, _, request in self._lines.get(name, ())]

    def _know(self, name: str) -> None:
        if name not in self._forecasts:
            self._lines.setdefault(name, [])
            self._committed[name], self._prefilling[name] = 0, set()
            self._forecasts[name] = OutputForecast()
            self._last_event[name] = self.group.clock.now

    def _wait(self, request: SimulatedRequest) -> None:
        heappush(self._lines[request.model], (self._order(request), self._places[request.id], request))

    # --- starts

    def start(self, name: str) -> None:
        """Starts the requests of a model's queue that may start."""
        self.generate(self.take(name))

    def start_all(self) -> None:
        for name, line in self._lines.items():
            if line:
                self.start(name)

    def take(self, name: str, tokens: float = inf) -> list[SimulatedRequest]:
        """Removes and returns the requests that start now; the last one is the one with which `tokens` tokens of
        prompts are reached."""
        resident, line = self.group.active.get(name), self._lines[name]
        taken: list[SimulatedRequest] = []
        if resident is None or not line:
            return taken
        reach = self._reach(name) if self._bounded else inf
        prefilling, forecast = self._prefilling[name], self._forecasts[name].tokens
        while line and tokens > 0 and len(prefilling) < self._most_prefilling:
            request = line[0][-1]
            needed = resident.kv.bytes_of(request.to_prefill + min(request.most_new_tokens, forecast))
            if self._committed[name] and self._committed[name] + needed > reach:
                break
            heappop(line)
            request.committed = needed
            self._committed[name] += needed
            prefilling.add(request.id)
            tokens -= request.to_prefill
            taken.append(request)
        return taken

    def generate(self, taken: list[SimulatedRequest]) -> None:
        for request in taken:
            engine = self.group.active[request.model].engine
            assert engine is not None
            engine.generate(request)

    def _reach(self, name: str) -> int:
        """Bytes of KV that the model may reach: what it holds, what is free, and what others hold idle, above their
        floors."""
        memory = self.group.memory.for_admission()
        reach = memory.free
        for holding in memory.holdings:
            if holding.model == name:
                reach += holding.held
            else:
                reach += min(holding.idle, holding.held - memory.floors.get(holding.model, 0))
        return min(memory.limits[name], reach)

    # --- engines (a Listener)

    def first_token(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        if isnan(request.first_at):
            request.first_at = self.group.clock.now
        self._prefill_over(request)

    def prefilled(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        pass

    def stepped(self, engine: SimulatedEngine, steps: int, tokens: int) -> None:
        pass

    def finished(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        self._forecasts[request.model].observe(request.output_tokens)
        self.forget(request)
        self.group.finished(request)
        self.group.clock.after(0.0, self.start_all)

    def parked(self, engine: SimulatedEngine, request: SimulatedRequest) -> None:
        """Puts the request in the queue again, until another has ended."""
        self._left_engine(request)
        self._wait(request)
        if not self._committed[request.model]:
            self.group.clock.after(0.0, self.start, request.model)

    def _left_engine(self, request: SimulatedRequest) -> None:
        self._committed[request.model] -= request.committed
        request.committed = 0
        self._prefill_over(request)

    def _prefill_over(self, request: SimulatedRequest) -> None:
        """Notes that the request's prefill has ended, or was given up."""
        prefilling = self._prefilling[request.model]
        if request.id in prefilling:
            full = len(prefilling) >= self._most_prefilling
            prefilling.discard(request.id)
            if full:
                self.group.clock.after(0.0, self.start, request.model)
