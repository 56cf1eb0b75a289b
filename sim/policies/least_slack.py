"""Least slack: what the Prism authors' public code does instead of the paper's algorithms.

As in that code: requests start in order of arrival + TTFT target - the time of their prefill at 2048 tokens a second
(at least 0.2, at most 2 s), the same for every model; no request is left out because it would be late. A model with
more than ten requests that wait for their prefill gets no more; there is no prefill turn. A model comes up where memory
is: of the groups within 5 GB of the one with the most, the one whose waiting requests have the most time left. Models
without requests for 50 s leave, whether their memory is wanted or not. Every 5 s, where the memory per request of one
group is 15 times that of another, the one with the least gives away its model with the fewest requests, if fewer such
pairs are left afterwards; one model a round. Memory per request: capacity less weights, over the requests that are
there (mean of the last 30 s).

Given here, and not in that code: CUDA graphs, an exact fit of weights, engines and floors instead of a constant of 6
GB, hibernation in place of engines that are made anew, an activation as soon as it is requested (there: with the next
round), and a source that serves until the target of a move is up. Two groups without requests count as balanced (there:
as unbalanced, which looks like a slip). KV is elastic, and a request starts if the free memory allows it, as in its
engines.

Settings: ratio (default: 15), idle_s (default: 50), round_s (default: 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import inf

from sim.cluster.terms import suitable
from sim.group.node import SimulatedGroup, SimulatedResident
from sim.inputs.catalogue import Spec
from sim.inputs.request import SimulatedRequest
from sim.policies.lines import EngineQueues
from sim.policies.settings import numbers
from sim.system import World

_PREFILL_TOKENS_PER_S = 2048
_LEAST_PREFILL_S, _MOST_PREFILL_S = 0.2, 2.0
_MOST_PREFILLING = 11
"""Number of prefilling requests at which a model is skipped: more than ten."""
_ALIKE_BYTES = 5_000_000_000
_SAMPLE_S, _SAMPLES = 1.0, 30
_ASK_AGAIN_S = 0.5
"""Seconds before a model that found no room is tried again."""
_DRAIN_S = 30.0
"""Seconds that the source of a move may take to finish what it runs, as under Prism."""


def latest_start(request: SimulatedRequest) -> float:
    prefill_s = request.to_prefill / _PREFILL_TOKENS_PER_S
    return request.deadline - min(max(prefill_s, _LEAST_PREFILL_S), _MOST_PREFILL_S)


class PlannedPlace:
    """A group with its queues, and how many requests were there lately."""

    def __init__(
        self,
        world: World,
        number: int,
        back: Callable[[list[SimulatedRequest]], None],
        ended: Callable[[SimulatedRequest], None],
    ) -> None:
        self.group = SimulatedGroup(
            world.clock,
            f"g{number}",
            world.sizes[number],
            world.hardware,
            lambda group: EngineQueues(group, order=latest_start, most_prefilling=_MOST_PREFILLING),
            back,
            ended,
        )
        assert isinstance(self.group.queue, EngineQueues)
        self.lines = self.group.queue
        self._samples: deque[dict[str, int]] = deque(maxlen=_SAMPLES)

    def sample(self) -> None:
        self._samples.append({name: self.lines.outstanding(name) for name in self.group.active})

    def requests(self, name: str) -> float:
        """Mean number of a model's requests over the samples."""
        return sum(sample.get(name, 0) for sample in self._samples) / max(1, len(self._samples))

    @property
    def free(self) -> int:
        """Bytes on each device that no weights, engine or floor needs."""
        ledger = self.group.memory.device.ledger
        return ledger.capacity - sum(booking.total for booking in ledger.bookings.values())

    def needs(self, spec: Spec) -> int:
        group = self.group
        kept = group.memory.device.ledger.bookings.get(spec.name)
        return group.hardware.quota_bytes + group.own_bytes(spec) + group.floor(spec) - (kept.total if kept else 0)

    @property
    def sleepers(self) -> list[SimulatedResident]:
        return [resident for resident in self.group.residents.values() if resident.asleep and not resident.waking]

    def time_left(self, now: float) -> float:
        """Mean seconds that waiting requests have left; +inf if there are none."""
        left = [r.deadline - now for name in self.group.residents for r in self.lines.waiting(name)]
        return sum(left) / len(left) if left else inf


class LeastSlack:
    """The groups, and the place of each model."""

    def __init__(
        self,
        world: World,
        finished: Callable[[SimulatedRequest], None],
        ratio: float = 15.0,
        idle_s: float = 50.0,
        round_s: float = 5.0,
    ) -> None:
        self._clock = world.clock
        self._ratio, self._idle_s, self._round_s = ratio, idle_s, max(round_s, 0.1)
        self._places = [PlannedPlace(world, i, self._again, finished) for i in range(len(world.sizes))]
        self.groups: Sequence[SimulatedGroup] = [place.group for place in self._places]
        self._specs = {spec.name: spec for spec in world.specs}
        for spec in world.specs:
            suitable(spec, self.groups)
        self._home: dict[str, PlannedPlace] = {}
        self._parked: dict[str, list[SimulatedRequest]] = {}
        """Model that is nowhere and found no room -> its requests."""
        self._moving = ""
        self.migrations = 0
        self._clock.after(_SAMPLE_S, self._sample)
        self._clock.after(self._round_s, self._round)

    @property
    def figures(self) -> Mapping[str, int]:
        return {"migrations": self.migrations}

    # --- requests

    def submit(self, request: SimulatedRequest) -> None:
        place = self._home.get(request.model)
        if place is not None:
            place.lines.submit(request)
        elif request.model in self._parked:
            self._parked[request.model].append(request)
        else:
            self._parked[request.model] = [request]
            self._activate(request.model)

    def _again(self, requests: Sequence[SimulatedRequest]) -> None:
        for request in requests:
            self._clock.after(0.0, self.submit, request)

    # --- up and down

    def _activate(self, name: str) -> None:
        spec = self._specs[name]
        place = self._freest(spec)
        if place is None:
            self._clock.after(_ASK_AGAIN_S, self._activate, name)
            return
        self._home[name] = place
        place.group.activate(spec, lambda up: self._activated(name, place, up), self._cold(place, spec))
        for request in self._parked.pop(name):
            place.lines.submit(request)

    def _activated(self, name: str, place: PlannedPlace, up: bool) -> None:
        if not up and self._home.get(name) is place:
            del self._home[name]

    def _freest(self, spec: Spec) -> PlannedPlace | None:
        """The place for a model, by free memory; None if no group has room. Sleeping engines count as room: they can go
        cold."""
        found: list[tuple[int, PlannedPlace]] = []
        for place in self._places:
            present = place.group.residents.get(spec.name)
            if place.group.devices != spec.parts or (present is not None and not present.asleep):
                continue  # too small, or the model is still on its way down there
            others = sum(resident.spec.name != spec.name for resident in place.sleepers)
            if place.free + others * place.group.hardware.kept_bytes >= place.needs(spec):
                found.append((place.free, place))
        most = max((free for free, _ in found), default=0)
        alike = [place for free, place in found if free >= most - _ALIKE_BYTES]
        return max(alike, key=lambda place: place.time_left(self._clock.now), default=None)

    def _cold(self, place: PlannedPlace, spec: Spec) -> list[tuple[str, bool]]:
        """(model, True) of sleeping models that have to go cold to make room."""
        lacking = place.needs(spec) - place.free
        count = max(0, -(-lacking // place.group.hardware.kept_bytes))
        return [(r.spec.name, True) for r in place.sleepers if r.spec.name != spec.name][:count]

    # --- rounds

    def _sample(self) -> None:
        self._clock.after(_SAMPLE_S, self._sample)
        for place in self._places:
            place.sample()

    def _round(self) -> None:
        self._clock.after(self._round_s, self._round)
        for place in self._places:
            for name in list(place.group.active):
                if place.lines.idle_s(name) > self._idle_s and name != self._moving:
                    self._home.pop(name, None)
                    place.group.bring_down(name, False, lambda: None)
        if not self._moving:
            self._move()

    def _move(self) -> None:
        for size in sorted({group.devices for group in self.groups}):
            places = [place for place in self._places if place.group.devices == size]
            requests = {place: {name: place.requests(name) for name in place.group.active} for place in places}
            before = self._unbalanced(requests)
            if not before:
                continue
            ranked = sorted(places, key=lambda place: self._per_request(place, requests[place]))
            source = ranked[0]
            asked = sorted((count, name) for name, count in requests[source].items() if count > 0)
            if len(source.group.active) < 2:
                continue
            for count, name in asked:
                for target in reversed(ranked[1:]):
                    fits = name not in target.group.residents and target.free >= target.needs(self._specs[name])
                    after = {place: dict(counts) for place, counts in requests.items()}
                    del after[source][name]
                    after[target][name] = count
                    if fits and self._unbalanced(after) < before:
                        self._migrate(name, source, target)
                        return

    def _per_request(self, place: PlannedPlace, requests: Mapping[str, float]) -> float:
        """Bytes of memory for each request; +inf without requests."""
        total = sum(requests.values())
        weights = sum(place.group.own_bytes(self._specs[name]) for name in requests)
        return (place.group.hardware.capacity_bytes - weights) / total if total else inf

    def _unbalanced(self, requests: Mapping[PlannedPlace, Mapping[str, float]]) -> int:
        """Number of pairs of groups that are unbalanced."""
        each = sorted(self._per_request(place, counts) for place, counts in requests.items())
        return sum(less < inf and more > self._ratio * less for less, more in combinations(each, 2))

    def _migrate(self, name: str, source: PlannedPlace, target: PlannedPlace) -> None:
        self._moving = name

        def prepared(up: bool) -> None:
            if not up or name not in source.group.active:
                self._moving = ""
                return
            self._home[name] = target
            source.group.bring_down(name, True, self._moved, _DRAIN_S)

        target.group.activate(self._specs[name], prepared)

    def _moved(self) -> None:
        self._moving = ""
        self.migrations += 1


def build(world: World, finished: Callable[[SimulatedRequest], None], settings: dict[str, str]) -> LeastSlack:
    return LeastSlack(world, finished, **numbers("least_slack", settings, ("ratio", "idle_s", "round_s")))
