"""QLM: requests are packed into request groups by model, which wait in one virtual queue for each group of devices, in
the order of their SLOs, and models are swapped in and out for them.

As in the paper: a new request joins the open request group of its model, or opens one, which goes to devices that have
nothing to do, whatever model is there, else to the virtual queue with the least work. A virtual queue is in order of
deadline. While its first request group is for the model that is there, all of it starts at once (over-batching: no
bound but memory); one for another model swaps the models, and what runs is preempted and packed again. Preempted
requests keep what they generated, and their KV is computed again.

Given here, and not in its authors' system, where a swap restarts the engine: the warm pool and hibernation with CUDA
graphs (`owned.py`), so that most swaps take tenths of a second. A swap comes no earlier than its request group needs it
to be on time, and request groups of the present model pass meanwhile, as its authors' estimator of waiting times would
have it. What they leave open: a preempted request gets its TTFT target anew as the deadline to go on, best effort
counts as a deadline of a minute, and a model that came stays while it has work until it has prefilled something, and
for `stay_s` at least; otherwise models trade places for a token each. Of 0.3, 1, 2, 4 and 8 s the default served most
on time on a slice with constant swapping (79 %, with 1 s 23 %); on another it was 3 points under the best, 2 s.

Settings: swap_aware (default: 0; 1: request groups go where they would start first, the swap and the models that are
there counted), stay_s (default: 4), group_requests (default: 32).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan

from sim.clock import Timer
from sim.cluster.terms import suitable
from sim.engines.cost import Cost
from sim.inputs.request import SimulatedRequest
from sim.policies.owned import Owned
from sim.policies.settings import numbers
from sim.system import World

_BEST_EFFORT_S = 60.0
"""Seconds until the deadline of requests without a target."""


@dataclass(eq=False, slots=True)
class RequestGroup:
    """Requests of one model that go together."""

    model: str
    due: float
    """The earliest of their deadlines, in seconds."""
    number: int
    requests: list[SimulatedRequest] = field(default_factory=list)

    @property
    def order(self) -> tuple[float, int]:
        return self.due, self.number


@dataclass(eq=False, slots=True)
class QlmServer:
    """A device group and its virtual queue."""

    owned: Owned
    queue: list[RequestGroup] = field(default_factory=list)
    """Request groups by deadline."""
    timer: Timer | None = None


class Qlm:
    """The virtual queues."""

    def __init__(
        self,
        world: World,
        finished: Callable[[SimulatedRequest], None],
        swap_aware: float = 0.0,
        stay_s: float = 4.0,
        group_requests: float = 32.0,
    ) -> None:
        self._clock = world.clock
        self._finished = finished
        self._swap_aware = swap_aware > 0
        self._stay_s = stay_s
        self._most = max(1, int(group_requests))
        self._servers = [
            QlmServer(Owned(world, i, self._again, self._ended, self._changed)) for i in range(len(world.sizes))
        ]
        self.groups = [server.owned.group for server in self._servers]
        self._specs = {spec.name: spec for spec in world.specs}
        self._speeds = {spec.name: Cost(spec.shape, world.hardware).prefill_tokens_per_s for spec in world.specs}
        for spec in world.specs:
            suitable(spec, self.groups)
        self._open: dict[str, tuple[QlmServer, RequestGroup]] = {}
        """Model -> its server and the request group that new requests join."""
        self._made = 0
        self.preempted = 0

    @property
    def figures(self) -> Mapping[str, int]:
        return {"swaps": sum(server.owned.swaps for server in self._servers), "preempted": self.preempted}

    def submit(self, request: SimulatedRequest) -> None:
        due = request.deadline if isnan(request.first_at) else self._clock.now + request.ttft_s
        if due == inf:
            due = self._clock.now + _BEST_EFFORT_S
        server, group = self._open.get(request.model, (None, None))
        if server is None or group is None or len(group.requests) >= self._most:
            server = self._choose(request.model)
            self._made += 1
            group = RequestGroup(request.model, due, self._made)
            insort(server.queue, group, key=lambda group: group.order)
            self._open[request.model] = (server, group)
        elif due < group.due:
            group.due = due
            server.queue.sort(key=lambda group: group.order)
        group.requests.append(request)
        self._look(server)

    def _choose(self, name: str) -> QlmServer:
        servers = [server for server in self._servers if server.owned.group.devices == self._specs[name].parts]
        if self._swap_aware:
            return min(servers, key=lambda server: (self._starts_in(server, name), server.owned.owner != ""))
        return min(servers, key=lambda server: (bool(server.queue), not server.owned.empty, self._work(server)))

    def _work(self, server: QlmServer) -> float:
        """Seconds of prefill that wait."""
        return sum(self._prefill_s(group) for group in server.queue)

    def _starts_in(self, server: QlmServer, name: str) -> float:
        """Seconds until a request group of the model would begin, at the end of the virtual queue."""
        owned = server.owned
        at, seconds = owned.owner, self._work(server)
        for model in [*(group.model for group in server.queue), name]:
            if model != at:
                seconds += owned.up_s(self._specs[model]) + (0.0 if owned.empty else self._stay_s)
                at = model
        return seconds

    def _prefill_s(self, group: RequestGroup) -> float:
        return sum(request.to_prefill for request in group.requests) / self._speeds[group.model]

    # --- a virtual queue

    def _look(self, server: QlmServer) -> None:
        """Starts the request groups that may start, and swaps when it is time."""
        if server.timer is not None:
            server.timer.cancel()
            server.timer = None
        owned = server.owned
        while server.queue and not owned.changing:
            head = server.queue[0]
            mine = [group for group in server.queue if group.model == owned.owner]
            swap_at = self._swap_at(server, head) if head.model != owned.owner and (mine or not owned.empty) else -inf
            if head.model != owned.owner and self._clock.now >= swap_at:
                owned.give(self._specs[head.model])
                return
            if not mine:
                if swap_at < inf:
                    server.timer = self._clock.at(swap_at, self._look, server)
                return
            self._dispatch(server, mine[0])

    def _swap_at(self, server: QlmServer, head: RequestGroup) -> float:
        """Second at which to swap for `head`; +inf while the present model has not prefilled anything yet: then all of
        its work would be lost."""
        if not server.owned.began:
            return inf
        latest = head.due - server.owned.up_s(self._specs[head.model]) - self._prefill_s(head)
        return max(latest, server.owned.since + self._stay_s)

    def _dispatch(self, server: QlmServer, group: RequestGroup) -> None:
        server.queue.remove(group)
        if self._open.get(group.model) == (server, group):
            del self._open[group.model]
        for request in group.requests:
            server.owned.lines.submit(request)

    def _changed(self, owned: Owned) -> None:
        self._look(next(server for server in self._servers if server.owned is owned))

    def _ended(self, owned: Owned, request: SimulatedRequest) -> None:
        self._finished(request)
        if owned.empty:
            self._clock.after(0.0, self._changed, owned)

    def _again(self, requests: Sequence[SimulatedRequest]) -> None:
        """Takes back requests that were preempted."""
        self.preempted += len(requests)
        for request in requests:
            self._clock.after(0.0, self.submit, request)


def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> Qlm:
    return Qlm(world, finished, **numbers("qlm", settings, ("swap_aware", "stay_s", "group_requests")))
