"""Activation: where a model that is not active comes up, and which models have to leave for it.

A model comes up on the group with the least resulting pressure where it fits, if need be after evicting models that may
be evicted. Two preferences: groups where no model has to leave, broken by a gain of more than tau, and the group where
the model hibernates, broken only by a much larger gain (it wakes in tenths of a second there and starts cold
elsewhere). Where nothing fits the answer is `Refuse`, if nothing ever could, or `Wait`, with the arithmetic of the
nearest group.

This module says what one group has to offer, and how to choose among several; `group_index.py` says which groups are
looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from placement.policy.field import Option
from placement.policy.kvpr import Books, Group, Model, Place, pressure_text
from placement.policy.lifecycle.decisions import Activate, GoCold, Hibernate, LifecycleRules, PlacedModel, Refuse, Wait
from placement.policy.lifecycle.model_eviction import Eviction, evict, freed_by, may_leave
from placement.policy.lifecycle.refusal import arithmetic
from services.wording.plurals import agreeing


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """The outcome for one model. `evictions` have to be done before an `Activate`."""

    outcome: Activate | Refuse | Wait
    evictions: tuple[Hibernate | GoCold, ...] = ()
    options: tuple[Option, ...] = ()
    """The groups that were compared, least pressure first."""


def chosen(model: Model, found: list[GroupOption], compared: int, rules: LifecycleRules) -> ActivationPlan:
    """The plan for the best of the options in `found`, out of `compared` groups that had room. Sorts `found`."""
    found.sort(key=lambda f: (f.pressure, -f.idle_s))
    best = _prefer(found, rules)
    outcome = Activate(model.name, best.place, best.pressure, _why(best, found, compared, rules))
    return ActivationPlan(outcome, best.evictions, tuple(Option(f.place, f.pressure) for f in found[: rules.explain]))


def belongs(model: Model, option: GroupOption) -> ActivationPlan:
    """The plan for the group where the model belongs by the traffic of earlier hours."""
    here, pressure = option.place.group, pressure_text(option.pressure)
    why = f"it belongs on {here} by the traffic of earlier hours; pressure {pressure} there"
    outcome = Activate(model.name, option.place, option.pressure, why)
    return ActivationPlan(outcome, options=(Option(option.place, option.pressure),))


def wait(model: Model, lacking: Sequence[tuple[int, str]]) -> ActivationPlan:
    """The plan to wait. `lacking`: bytes that the nearest groups lack, with the sentence about each (`lack`, below)."""
    return ActivationPlan(Wait(model.name, f"no group has room now; the nearest is {min(lacking)[1]}"))


def wait_for_others(model: Model) -> ActivationPlan:
    """The plan to wait where every group that could hold the model is closed to it."""
    why = "no group has room now: those that could hold it are reserved for other models, or have it"
    return ActivationPlan(Wait(model.name, why))


@dataclass(frozen=True, slots=True)
class GroupOption:
    """A group where the model can come up."""

    place: Place
    pressure: float
    """The highest resulting pressure on the place's devices."""
    evictions: tuple[Hibernate | GoCold, ...]
    home: bool
    idle_s: float = inf
    """The least idle time in seconds of the models that leave; +inf if none that is awake does."""


def attempt(model: Model, group: Group, here: Sequence[PlacedModel], rules: LifecycleRules) -> GroupOption | None:
    """The model's option on one group, with the evictions that it takes; None if there is none."""
    others = [r for r in here if r.model.name != model.name]
    mine = next((r for r in here if r.model.name == model.name and r.hibernating), None)
    if mine is not None:  # its engine is bound to its devices, and was measured there
        model = mine.model.wanted(model.demand)
        group = Group(group.name, tuple(d for d in group.devices if d.name in mine.place.devices))
    books = _booked(group, others)
    pressure, devices = books.best(model, group)
    engines_wanted = 0 if mine is not None else engines_lacking(group, others)
    in_the_way = [r for r in others if rules.exclusive and not r.hibernating]
    if devices and not in_the_way and not engines_wanted:
        return GroupOption(Place(group.name, devices), pressure, (), mine is not None)
    gone = _booked(group, [r for r in others if not may_leave(r, rules)])
    _, devices = gone.best(model, group)
    if not devices or not all(may_leave(r, rules) for r in in_the_way):
        return None
    for spare in (0, 1):  # a byte more if nothing would be left for KV
        wanted = {device: max(0, model.needed + spare - books.free(device)) for device in devices}
        for device, freed in freed_by(in_the_way, rules).items():
            wanted[device] = max(wanted.get(device, 0), freed)
        eviction = evict(others, wanted, rules, engines_wanted=engines_wanted, for_whom=model.name)
        pressure = _after(model, group, devices, others, eviction)
        if eviction.enough and pressure < inf:
            left = {d.model for d in eviction.decisions}
            idle_s = min((r.idle_s for r in others if r.model.name in left and not r.hibernating), default=inf)
            return GroupOption(Place(group.name, devices), pressure, eviction.decisions, mine is not None, idle_s)
    return None


def engines_lacking(group: Group, others: Iterable[PlacedModel]) -> int:
    """How many of the other models' engines have to go before another model gets one on the group."""
    return int(max(0, sum(r.has_engine for r in others) + 1 - group.engines))


def _after(
    model: Model, group: Group, devices: Sequence[str], others: Sequence[PlacedModel], eviction: Eviction
) -> float:
    """The highest pressure on the devices with the model there and the evicted models gone."""
    left = {d.model: isinstance(d, GoCold) for d in eviction.decisions}
    after = Books([group])
    for resident in others:
        if not left.get(resident.model.name, False):
            booked = resident.model.asleep() if resident.model.name in left else resident.booked
            after.book(booked, [d for d in resident.place.devices if d in _names(group)])
    return max(after.resulting(model, device) for device in devices)


def _prefer(found: Sequence[GroupOption], rules: LifecycleRules) -> GroupOption:
    """The best option; `found` is sorted by pressure."""
    best = found[0]
    calm, home = next((f for f in found if not f.evictions), None), next((f for f in found if f.home), None)
    for favoured, gain in ((calm, rules.tau), (home, rules.home)):
        if favoured is not None and not best.pressure < favoured.pressure * (1 - gain):
            best = favoured
    return best


def _why(best: GroupOption, found: Sequence[GroupOption], compared: int, rules: LifecycleRules) -> str:
    text = f"pressure {pressure_text(best.pressure)} on {best.place.group}"
    least = found[0]
    if least is not best and least.pressure < best.pressure:
        gain = rules.home if best.home else rules.tau
        text += f", {pressure_text(least.pressure)} on {least.place.group}: not less by more than {gain:.0%}"
    elif compared > 1:
        text += f", the least of {compared} groups"
    if best.home:
        text += "; it hibernates there"
    if best.evictions:
        text += "; " + " and ".join(d.model for d in best.evictions)
        text += f" {agreeing(len(best.evictions), 'leaves', 'leave')} first"
    return text


def _booked(group: Group, residents: Iterable[PlacedModel]) -> Books:
    books = Books([group])
    names = _names(group)
    for resident in residents:
        books.book(resident.booked, [device for device in resident.place.devices if device in names])
    return books


def _names(group: Group) -> set[str]:
    return {device.name for device in group.devices}


def lack(model: Model, group: Group, here: Sequence[PlacedModel], rules: LifecycleRules) -> tuple[int, str]:
    """Bytes that the group lacks to hold the model, and the sentence about it."""
    others = [r for r in here if r.model.name != model.name]
    mine = next((r for r in here if r.model.name == model.name and r.hibernating), None)
    free = _nth_most(group, model.parts, _booked(group, others))
    after = _nth_most(group, model.parts, _booked(group, [r for r in others if not may_leave(r, rules)]))
    text = f"{group.name}: {arithmetic(model)}, {free:,} free, {after:,} with all idle models gone"
    if mine is None and engines_lacking(group, [r for r in others if not may_leave(r, rules)]):
        text += f"; {agreeing(int(group.engines), 'its engine has', f'all its {group.engines} engines have')} a model"
        text += " that is pinned or busy (engines.limit)"
    return model.needed - after, text


def _nth_most(group: Group, parts: int, books: Books) -> int:
    return sorted((books.free(device.name) for device in group.devices), reverse=True)[parts - 1]
