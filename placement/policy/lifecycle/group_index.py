"""The groups of one size, kept between decisions: what is on each, and all of it as arrays.

A model that comes up could be tried on every group in turn (`activation.attempt`), which takes a fifth of a second for
10,000 groups. The arrays give for all groups at once a pressure that no attempt can beat. Where the new model fits, it
is the pressure with every model where it is; elsewhere, that with all models gone that may leave. So the groups are
tried from the least pressure on (of equals the longest idle first), and only until none of the others can be better, or
`TRIES` were tried: where all groups are full of idle models the arrays do not say what is left once only as many of
them have gone as have to, and a good one will do.

The owner of a GroupIndex reports changes group by group (`hear`); the index has no other notion of time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from placement.policy.field import Field, Floats, Mask
from placement.policy.kvpr import LEAST_DEMAND, Group, Model, Place
from placement.policy.lifecycle.activation_plan import (
    ActivationPlan,
    GroupOption,
    attempt,
    belongs,
    chosen,
    lack,
    wait,
    wait_for_others,
)
from placement.policy.lifecycle.decisions import Activate, LifecycleRules, PlacedModel, Refuse
from placement.policy.lifecycle.kv_pressure import relieve
from placement.policy.lifecycle.model_eviction import Eviction, may_leave
from placement.policy.lifecycle.preemption import holds, preempt
from placement.policy.lifecycle.refusal import LongestRequest, refusal

TRIES = 12
"""The most groups that are tried closely; each takes a fraction of a millisecond."""


@dataclass(slots=True)
class _Arrays:
    """All groups as arrays, by the number that `row` has for each."""

    groups: Sequence[Group]
    row: dict[str, int]
    now: Field
    """The groups with every model where it is."""
    gone: Field
    """The groups without the models that may leave."""
    busy: Mask
    """Whether a model is awake there that may not leave."""
    idle_s: Floats
    """Least idle time in seconds of the models that are awake and may leave; +inf if there are none."""
    engines: Floats
    """Number of engines that further models can have."""
    engines_gone: Floats
    """Number of engines that further models can have once the models that may leave are gone."""


class GroupIndex:
    """Which models are on which group."""

    def __init__(self, rules: LifecycleRules | None = None) -> None:
        self._rules = rules or LifecycleRules()
        self._groups: dict[str, Group] = {}
        self._on: dict[str, Sequence[PlacedModel]] = {}
        self._with: dict[str, dict[str, None]] = {}
        """Model -> names of the groups where it is, in any state."""
        self._arrays: _Arrays | None = None
        """The arrays; None if groups have come, gone or changed since they were made."""
        self._unbooked: dict[str, None] = {}
        """Names of groups that were heard since the arrays were last brought up to date."""

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def __contains__(self, name: str) -> bool:
        """Whether there is a group of that name."""
        return name in self._groups

    @property
    def groups(self) -> list[Group]:
        return list(self._groups.values())

    @property
    def residents(self) -> list[PlacedModel]:
        """All that holds memory on the groups."""
        return [resident for here in self._on.values() for resident in here]

    def hear(self, group: Group, residents: Sequence[PlacedModel]) -> None:
        """Sets which models are on the group; the group may be new, or have other devices."""
        if self._groups.get(group.name) != group:
            self._groups[group.name] = group
            self._arrays = None
        for resident in self._on.get(group.name, ()):
            name = resident.model.name
            if (places := self._with.get(name)) is not None:  # a name may have been here twice
                places.pop(group.name, None)
                if not places:
                    del self._with[name]
        self._on[group.name] = residents
        for resident in residents:
            self._with.setdefault(resident.model.name, {})[group.name] = None
        self._unbooked[group.name] = None

    def lose(self, name: str) -> None:
        """Removes the group of that name; does nothing if there is none."""
        if name in self._groups:
            self.hear(self._groups[name], ())
            del self._groups[name], self._on[name]
            self._arrays = None

    # --- decisions

    def refused(self, model: Model, only: str | None = None, longest: LongestRequest | None = None) -> Refuse | None:
        """The reason for which no group could hold the model even if it were alone there; None if one could. `only`:
        name of the one group that the model may be on; None: any. `longest`: the request that its floor has room for,
        by which the reason tells whether a shorter context would fit."""
        if self._could_hold(model, only).any():
            return None
        return refusal(model, [group for group in self.groups if only in (None, group.name)], longest)

    def activate(
        self, model: Model, only: str | None = None, closed: Collection[str] = (), first: str | None = None
    ) -> ActivationPlan:
        """Where to bring up a model that is not active anywhere, and which models have to leave for it. `only`: name of
        the one group that the model may be on; None: any. `closed`: names of groups that are reserved for others.
        `first`: name of the group where a model that is on none belongs; it comes up there if none has to leave."""
        model = model.wanted(max(model.demand, LEAST_DEMAND))
        refused = self.refused(model, only)
        if refused is not None:
            return ActivationPlan(refused)
        at = self._at()
        could_hold = self._could_hold(model, only)
        could_hold[[at.row[name] for name in closed if name in at.row]] = False
        if not could_hold.any():
            return wait_for_others(model)
        homes = sorted(at.row[name] for name in self._with.get(model.name, ()) if could_hold[at.row[name]])
        if first is not None and first in at.row and could_hold[row := at.row[first]] and not homes:
            option = self._try(model, row)
            if option is not None and not option.evictions:
                return belongs(model, option)
        now = at.now.by_group(model)  # where no model has to leave
        bound, idle_s = at.gone.by_group(model), at.idle_s
        now[at.engines < 1] = bound[at.engines_gone < 1] = inf
        if self._rules.exclusive:
            bound[at.busy] = now[at.busy | (at.idle_s < inf)] = inf
        else:
            fits = now < inf
            bound[fits], idle_s = now[fits], np.where(fits, inf, idle_s)
        for row in homes:  # the arrays include what the model holds there itself
            now[row] = bound[row] = inf
        now[~could_hold] = bound[~could_hold] = inf
        possible = int(np.count_nonzero(bound < inf))

        found = [option for row in homes if (option := self._try(model, row)) is not None]
        if len(now) and now.min() < inf:
            found += self._tried(model, bound, int(now.argmin()))
        most, tries = max(1, self._rules.explain), 0
        while True:
            least = bound.min(initial=inf)
            if least == inf or sum(option.pressure <= least for option in found) >= most:
                break
            if found and tries >= TRIES:
                break
            tries += 1
            ties = np.flatnonzero(bound == least)
            found += self._tried(model, bound, int(ties[idle_s[ties].argmax()]))
        if found:
            return chosen(model, found, len(homes) + possible if tries < TRIES else len(found), self._rules)
        free = np.where(could_hold, at.gone.nth_most(at.gone.free, model.parts), -inf)
        nearest = dict.fromkeys([*homes, int(free.argmax())])
        return wait(model, [lack(model, at.groups[row], self._here(row), self._rules) for row in nearest])

    def replica(self, model: Model, here: Collection[str], closed: Collection[str]) -> ActivationPlan | None:
        """The plan to bring a model up on one more group; `here`: names of the groups where it is active, `closed`: of
        those where it may not come up, these among them. None unless there is a group where no model has to leave for
        it, and whose pressure with it is lower by more than tau than the highest one of its groups."""
        answer = self.activate(model, closed=closed)
        if not isinstance(answer.outcome, Activate) or answer.evictions:
            return None
        at = self._at()
        devices = [each.name for name in here if name in self._groups for each in self._groups[name].devices]
        if not devices:
            return None
        most = at.now.pressures()[list(at.now.numbers(Place("", tuple(devices))))].max()
        return answer if answer.outcome.pressure < (1 - self._rules.tau) * most else None

    def keep(self, model: Model, waited_s: float, only: str) -> ActivationPlan | None:
        """The plan for a reservation: the model comes up on the group `only`, from which models that have had their
        quantum leave too. None if they do not suffice yet, or the group is gone."""
        group = self._groups.get(only)
        if group is None:
            return None
        model = model.wanted(max(model.demand, LEAST_DEMAND))
        found = preempt(model, group, self._on[only], waited_s, self._rules)
        return None if found is None else chosen(model, [found], 1, self._rules)

    def to_reserve(self, model: Model, only: str | None = None, closed: Collection[str] = ()) -> str | None:
        """The group to be reserved for a model that found no room on any: of those that could hold it without all but
        their pinned models, the one whose awake models have the fewest requests that can still be on time. None if
        there is no such group."""
        at = self._at()
        rows: list[int] = np.flatnonzero(self._could_hold(model, only)).tolist()
        open_ones = (at.groups[row] for row in rows if at.groups[row].name not in closed)
        holding = (group for group in open_ones if holds(model, group, self._on[group.name]))
        best = min(holding, key=lambda group: sum(r.claims for r in self._on[group.name]), default=None)
        return None if best is None else best.name

    def relieve(self, name: str) -> Eviction:
        """The models that leave the group for the sake of KV there."""
        return relieve(self._groups[name], self._on[name], self._rules)

    def _tried(self, model: Model, bound: Floats, row: int) -> list[GroupOption]:
        bound[row] = inf
        option = self._try(model, row)
        return [] if option is None else [option]

    def _try(self, model: Model, row: int) -> GroupOption | None:
        return attempt(model, self._at().groups[row], self._here(row), self._rules)

    def _here(self, row: int) -> Sequence[PlacedModel]:
        return self._on[self._at().groups[row].name]

    def _could_hold(self, model: Model, only: str | None) -> Mask:
        at = self._at()
        could_hold: Mask = at.now.nth_most(at.now.capacity, model.parts) >= model.needed
        if only is not None:
            others = np.ones(len(could_hold), dtype=np.bool_)
            if only in at.row:
                others[at.row[only]] = False
            could_hold &= ~others
        return could_hold

    # --- arrays

    def _at(self) -> _Arrays:
        if self._arrays is None:
            now, gone = Field(self.groups, {}), Field(self.groups, {})
            groups, count = now.groups, len(self._groups)
            row = {group.name: i for i, group in enumerate(groups)}
            nobody = np.zeros(count, dtype=np.bool_)
            idle_s, engines, engines_gone = (np.full(count, inf) for _ in range(3))
            self._arrays = _Arrays(groups, row, now, gone, nobody, idle_s, engines, engines_gone)
            self._unbooked = dict.fromkeys(self._groups)
        for name in self._unbooked:
            self._book(self._arrays, self._groups[name])
        self._unbooked.clear()
        return self._arrays

    def _book(self, at: _Arrays, group: Group) -> None:
        here = self._on[group.name]
        leaving = [may_leave(resident, self._rules) for resident in here]
        booked = [(resident.booked, resident.place.devices, goes) for resident, goes in zip(here, leaving, strict=True)]
        for device in group.devices:
            at.now.rebook(device.name, [model for model, devices, _ in booked if device.name in devices])
            stay = [model for model, devices, goes in booked if device.name in devices and not goes]
            at.gone.rebook(device.name, stay)
        awake = [(r.idle_s, goes) for r, goes in zip(here, leaving, strict=True) if not r.hibernating]
        row = at.row[group.name]
        at.busy[row] = not all(goes for _, goes in awake)
        engines = [(r.has_engine, goes) for r, goes in zip(here, leaving, strict=True)]
        at.engines[row] = group.engines - sum(one for one, _ in engines)
        at.engines_gone[row] = group.engines - sum(one for one, goes in engines if not goes)
        at.idle_s[row] = min((idle_s for idle_s, goes in awake if goes), default=inf)


def index_groups(
    groups: Iterable[Group], residents: Iterable[PlacedModel] = (), rules: LifecycleRules | None = None
) -> GroupIndex:
    """A GroupIndex with these models on these groups."""
    made = GroupIndex(rules)
    by_group: dict[str, list[PlacedModel]] = {}
    for resident in residents:
        by_group.setdefault(resident.place.group, []).append(resident)
    for group in groups:
        made.hear(group, by_group.get(group.name, []))
    return made
