"""Eviction under demand: an idle model leaves only when its memory is wanted.

A model leaves if memory is wanted, it has been idle for `idle_s`, it is not pinned, and it did not come only lately
(`stay`). Hibernation comes first: weights, graphs and floor go, the engine keeps its addresses and a part of its quota.
If that is not enough, or host memory or an engine is wanted, models go cold and give back that and the engine too.
First goes the model with the least wake-up time / (bytes freed × seconds idle): a model that has been idle for t
seconds is likely to be idle for about t more, so wake-up time / t is about the share of time for which requests will
wait. A model without an image of its weights has nothing to wake up from: its cold start counts instead. A model stays
if the others that leave make its leaving needless.

Bytes are bytes on one device, seconds are durations; there is no clock here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from placement.policy.lifecycle.decisions import GoCold, Hibernate, LifecycleRules, PlacedModel

_LEAST_IDLE_S = 0.001


@dataclass(frozen=True, slots=True)
class Eviction:
    """The models that leave, and what is still missing afterwards."""

    decisions: tuple[Hibernate | GoCold, ...] = ()
    short: Mapping[str, int] = field(default_factory=dict)
    """Device -> bytes that are wanted and not freed."""
    host_short: int = 0
    engines_short: int = 0

    @property
    def enough(self) -> bool:
        """Whether everything that was wanted is freed."""
        return not self.short and self.host_short <= 0 and self.engines_short <= 0


def evict(
    residents: Iterable[PlacedModel],
    wanted: Mapping[str, int],
    rules: LifecycleRules | None = None,
    *,
    host_wanted: int = 0,
    engines_wanted: int = 0,
    for_whom: str = "",
    go_cold: bool = True,
) -> Eviction:
    """Chooses models to evict so that `wanted` bytes (device -> bytes), `host_wanted` bytes of host memory and
    `engines_wanted` engines come free; if nothing is wanted, none leaves. `go_cold`: whether engines may go where
    hibernation is not enough.

    The answer states what falls short; whether to carry out a part is the caller's choice.
    """
    rules = rules or LifecycleRules()
    leaving = [r for r in residents if not r.model.pinned]
    plan = _Eviction(leaving, wanted, host_wanted, engines_wanted, rules)
    plan.hibernate()
    if go_cold:
        plan.go_cold()
    plan.spare_the_needless()
    return plan.result(for_whom)


def may_leave(resident: PlacedModel, rules: LifecycleRules) -> bool:
    """Whether the model may be evicted now."""
    if resident.model.pinned:
        return False
    if resident.hibernating:
        return True
    return 0.0 < resident.idle_s >= rules.idle_s and resident.stay_s >= least_stay_s(resident, rules)


def least_stay_s(resident: PlacedModel, rules: LifecycleRules) -> float:
    """Seconds that a model stays awake at least before it makes way for others, unless its group is reserved for
    another. It is a multiple of what coming back will take, so that coming back is a small part of the model's time.
    How long it took to come up this time does not count: a model that was read from a slow disk for a minute wakes in
    a moment from now on."""
    return rules.stay * (_asleep_costs_s(resident) if rules.hibernate else resident.cold_s)


def freed_by(residents: Iterable[PlacedModel], rules: LifecycleRules) -> dict[str, int]:
    """Device -> bytes that come free when all of these models, which are awake, leave."""
    freed: dict[str, int] = {}
    for resident in residents:
        stays = resident.model.asleep().needed if rules.hibernate else 0
        for device in resident.place.devices:
            freed[device] = freed.get(device, 0) + resident.model.needed - stays
    return freed


class _Eviction:
    """Which residents go how far down; `_steps` has them in the order in which they were chosen."""

    def __init__(
        self,
        residents: Sequence[PlacedModel],
        wanted: Mapping[str, int],
        host: int,
        engines: int,
        rules: LifecycleRules,
    ) -> None:
        self._rules = rules
        self._wanted = {device: amount for device, amount in wanted.items() if amount > 0}
        self._host = max(0, host)
        self._engines = max(0, engines)
        self._sleepy = [r for r in residents if not r.hibernating and may_leave(r, rules)]
        self._asleep = [r for r in residents if r.hibernating]
        self._steps: list[tuple[PlacedModel, bool]] = []  # (resident, goes cold): two steps of a model

    def hibernate(self) -> None:
        if self._rules.hibernate:
            self._take(self._sleepy, cold=False)

    def go_cold(self) -> None:
        awake = (r for r, _ in self._steps) if self._rules.hibernate else self._sleepy
        self._take([*self._asleep, *awake], cold=True)
        if self._host_short() > 0 or self._engines_short() > 0:  # awake models hold both as well
            leaving = {step[0].model.name for step in self._steps}
            self._take([r for r in self._sleepy if r.model.name not in leaving], cold=True)

    def spare_the_needless(self) -> None:
        """Undoes steps that the others make needless, the most expensive first: the model stays (or at least stays in
        hibernation)."""
        for cold in (True, False):
            for step in sorted((s for s in self._steps if s[1] == cold), key=self._price, reverse=True):
                without = [other for other in self._steps if other != step]
                needed_to_go_cold = (step[0], True) in without
                same = self._short(without) == self._short(self._steps)
                if same and not needed_to_go_cold and self._host_and_engines_still_met(without):
                    self._steps = without

    def _host_and_engines_still_met(self, steps: Sequence[tuple[PlacedModel, bool]]) -> bool:
        host_met = self._host_short(steps) <= max(0, self._host_short())
        return host_met and self._engines_short(steps) <= max(0, self._engines_short())

    def result(self, for_whom: str) -> Eviction:
        decisions: list[Hibernate | GoCold] = []
        cold = {r.model.name for r, goes_cold in self._steps if goes_cold}
        for resident in {r.model.name: r for r, _ in self._steps}.values():
            name, group = resident.model.name, resident.place.group
            to_cold = name in cold
            amount = sum(sum(self._frees(*step).values()) for step in self._steps if step[0].model.name == name)
            wake = resident.cold_s if to_cold else _asleep_costs_s(resident)
            state = "hibernating" if resident.hibernating else f"idle for {resident.idle_s:.0f} s"
            wish = f"for {for_whom}" if for_whom else "for others"
            engine = " and an engine" if to_cold and self._engines else ""
            reason = f"{state}; frees {amount:,} bytes{engine} {wish}; back in about {wake:.2g} s"
            if not resident.has_image:
                reason += ", from its checkpoint: there is no image of its weights"
            decisions.append(GoCold(name, group, reason) if to_cold else Hibernate(name, group, reason))
        host, engines = max(0, self._host_short()), max(0, self._engines_short())
        return Eviction(tuple(decisions), self._short(self._steps), host, engines)

    def _take(self, candidates: Sequence[PlacedModel], *, cold: bool) -> None:
        for step in sorted(((r, cold) for r in candidates), key=self._price):
            short = self._short(self._steps)
            helps = any(device in short for device, freed in self._frees(*step).items() if freed > 0)
            helps |= cold and self._host_short() > 0 and step[0].host_bytes > 0
            helps |= cold and self._engines_short() > 0 and step[0].has_engine
            if helps:
                if cold and not self._at_once(step[0]) and (step[0], False) not in self._steps:
                    self._steps.append((step[0], False))
                self._steps.append(step)

    def _price(self, step: tuple[PlacedModel, bool]) -> tuple[float, float, str]:
        """Seconds of later waiting for each byte that helps and second idle; ties go to the longest idle."""
        resident, cold = step
        asleep_s = _asleep_costs_s(resident)
        seconds = max(0.0, resident.cold_s - asleep_s) if cold else asleep_s
        if not (resident.hibernating or self._rules.hibernate):
            seconds = resident.cold_s
        useful = sum(freed for device, freed in self._frees(*step).items() if device in self._wanted)
        if cold and self._host:
            useful += resident.host_bytes
        if cold and self._engines:
            useful += resident.has_engine
        each = seconds / useful / max(resident.idle_s, resident.returns_s, _LEAST_IDLE_S) if useful else inf
        return (each, -resident.idle_s, resident.model.name)

    def _at_once(self, resident: PlacedModel) -> bool:
        """Whether the model goes cold in one step: it hibernates already, or hibernation is off."""
        return resident.hibernating or not self._rules.hibernate

    def _frees(self, resident: PlacedModel, cold: bool) -> dict[str, int]:
        """Device -> bytes that the step frees: by hibernating, or by the engine's end if `cold`."""
        model = resident.model
        asleep = model.asleep().needed
        amount = asleep if cold else model.needed - asleep
        if not (resident.hibernating or self._rules.hibernate):
            amount = model.needed
        return dict.fromkeys(resident.place.devices, amount)

    def _short(self, steps: Sequence[tuple[PlacedModel, bool]]) -> dict[str, int]:
        left = dict(self._wanted)
        for step in steps:
            for device, freed in self._frees(*step).items():
                if device in left:
                    left[device] -= freed
        return {device: amount for device, amount in left.items() if amount > 0}

    def _host_short(self, steps: Sequence[tuple[PlacedModel, bool]] | None = None) -> int:
        steps = self._steps if steps is None else steps
        return self._host - sum(resident.host_bytes for resident, cold in steps if cold)

    def _engines_short(self, steps: Sequence[tuple[PlacedModel, bool]] | None = None) -> int:
        steps = self._steps if steps is None else steps
        return self._engines - sum(resident.has_engine for resident, cold in steps if cold)


def _asleep_costs_s(resident: PlacedModel) -> float:
    """Seconds that the model's next request waits once the model was hibernated."""
    return resident.wake_s if resident.has_image else resident.cold_s
