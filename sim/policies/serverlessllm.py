"""ServerlessLLM: a model has a whole group for itself while it is active, and starts where it starts fastest.

As in the paper: requests of models that have no server wait, first come first served; a server that is free goes to the
model whose request waits longest, of several free ones the one where that model starts fastest (where it sleeps, else
cold from the image in host memory; of equals the one unused longest). An instance takes all of its model's requests at
once: the batch has no bound but memory. Running requests are not preempted.

Given here, and not in its authors' system: the warm pool and hibernation with CUDA graphs, so that most starts take
tenths of a second; its loading format and its live migration have no counterpart (checkpoints are images in host memory
under every system here). An idle instance stays up until its server is wanted, or for `keep_alive_s`. What its authors
leave open: a model that is never idle would keep its server for ever; when a request has waited `patience_s` the server
whose model came up first takes no more requests, and is free when the last of them has ended. Any other is free once
its model has been idle for `idle_s`.

Settings: patience_s (default: 1), keep_alive_s (default: without end), idle_s (default: 0).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf

from sim.cluster.terms import suitable
from sim.group.node import SimulatedGroup
from sim.inputs.request import SimulatedRequest
from sim.policies.owned import Owned
from sim.policies.settings import numbers
from sim.system import World


class ServerlessLlm:
    """The servers, and the requests that have none."""

    def __init__(
        self,
        world: World,
        finished: Callable[[SimulatedRequest], None],
        patience_s: float = 1.0,
        keep_alive_s: float = inf,
        idle_s: float = 0.0,
    ) -> None:
        self._clock = world.clock
        self._finished = finished
        self._patience_s = patience_s
        self._keep_alive_s = keep_alive_s
        self._idle_s = idle_s
        self._servers = [
            Owned(world, i, self._again, self._ended, lambda server: self._look_soon()) for i in range(len(world.sizes))
        ]
        self.groups: Sequence[SimulatedGroup] = [server.group for server in self._servers]
        self._specs = {spec.name: spec for spec in world.specs}
        for spec in world.specs:
            suitable(spec, self.groups)
        self._waiting: dict[str, deque[SimulatedRequest]] = {}
        """Model without a server -> its waiting requests; the model whose request came first is the first."""
        self._since: dict[str, float] = {}
        """Model -> second at which the first of its waiting requests came."""
        self._draining: set[str] = set()
        """Names of groups that take no more requests."""
        self._looking = False

    @property
    def figures(self) -> Mapping[str, int]:
        return {"swaps": sum(server.swaps for server in self._servers)}

    def submit(self, request: SimulatedRequest) -> None:
        for server in self._servers:
            if server.owner == request.model and server.group.name not in self._draining:
                server.lines.submit(request)
                return
        if request.model not in self._waiting:
            self._waiting[request.model] = deque()
            self._since[request.model] = self._clock.now
            if self._patience_s < inf:
                self._clock.after(self._patience_s, self._look_soon)
        self._waiting[request.model].append(request)
        self._look_soon()

    def _look_soon(self) -> None:
        if not self._looking:
            self._looking = True
            self._clock.after(0.0, self._look)

    def _look(self) -> None:
        """Gives free servers to models that wait, and drains one for a model that has waited too long."""
        self._looking = False
        for name in list(self._waiting):
            spec = self._specs[name]
            servers = [server for server in self._servers if server.group.devices == spec.parts]
            free = [server for server in servers if self._is_free(server)]
            if free:
                server = min(free, key=lambda server: (server.up_s(spec), server.since))
                self._draining.discard(server.group.name)
                if server.owner != name:
                    server.give(spec)
                del self._since[name]
                for request in self._waiting.pop(name):
                    server.lines.submit(request)
            elif self._clock.now >= self._since[name] + self._patience_s:
                self._drain(servers)
        for server in self._servers:
            if server.group.name in self._draining and not self._wanted(server):
                self._draining.discard(server.group.name)
                self._since.pop(server.owner, None)
                for request in self._waiting.pop(server.owner, ()):
                    server.lines.submit(request)

    def _is_free(self, server: Owned) -> bool:
        if not server.empty or not server.owner or server.group.name in self._draining:
            return server.empty
        return _reached(server.lines.idle_s(server.owner), self._idle_s)

    def _drain(self, servers: Sequence[Owned]) -> None:
        """Drains a server; one at a time for each size."""
        if not any(server.group.name in self._draining or server.changing for server in servers):
            self._draining.add(min(servers, key=lambda server: server.since).group.name)

    def _wanted(self, server: Owned) -> bool:
        """Whether a model other than its owner waits for such a server."""
        size = server.group.devices
        return any(name != server.owner and self._specs[name].parts == size for name in self._waiting)

    def _ended(self, server: Owned, request: SimulatedRequest) -> None:
        self._finished(request)
        if server.empty:
            if self._idle_s and server.group.name not in self._draining:
                self._clock.after(self._idle_s, self._look_soon)
            else:
                self._look_soon()
            if self._keep_alive_s < inf:
                self._clock.after(self._keep_alive_s, self._unload, server, server.owner)

    def _unload(self, server: Owned, name: str) -> None:
        idle = server.owner == name and server.empty
        if idle and _reached(server.lines.idle_s(name), self._keep_alive_s):
            server.leave()

    def _again(self, requests: Sequence[SimulatedRequest]) -> None:
        """Takes back requests whose start has failed."""
        for request in requests:
            self._clock.after(0.0, self.submit, request)


def _reached(idle_s: float, least_s: float) -> bool:
    """Whether `idle_s` has reached `least_s`: when a timer of that length has just run out, a difference of times may
    be slightly less."""
    return idle_s >= least_s - 1e-9


def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> ServerlessLlm:
    known = ("patience_s", "keep_alive_s", "idle_s")
    return ServerlessLlm(world, finished, **numbers("serverlessllm", settings, known))
