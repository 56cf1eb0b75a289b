"""Promises: to models that want a place where all are busy.

A model that found no room waits. When it has waited for `patience_s` a group is promised to it: nobody else comes up
there until it has, so that room which comes free is not taken by those who need less. There, as soon as those that
have been awake for a quantum suffice to make room, they give it up: first the idle ones, then those with the fewest
requests that can still be on time, of these the one that has been awake longest. They then wait like any other.

So with k models that are always asked for, on a group where they are promised a place one after the other, a model
waits at most

    patience + (k - 1) (quantum + change)

where `change` is what a drain, a wake-up and the next look at it take together: of the others each is promised the
group at most once before it, since those that come back wait behind it, and who is promised it waits for the youngest
one there to have had its quantum. (Pinned models never give up theirs; what is left must hold the model. For one that
no group could hold beside them there is no bound, and those behind it do not wait for it.)

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from placement.policy.kvpr import Model
from placement.policy.lifecycle.activation import ActivationPlan
from placement.policy.lifecycle.decisions import Wait
from placement.policy.lifecycle.group_index import GroupIndex

FORGOTTEN_S = 5.0
"""Who has not asked for so long has stopped asking."""


@dataclass(slots=True)
class _Wait:
    since: float
    asks_until: float
    group: str = ""
    """The one that it is promised."""
    hopeless: bool = False
    """There is none that could be: it holds nobody up."""


class Reservations:
    """Who waits, since when, and for which group. One for all groups of one size."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waits: dict[str, _Wait] = {}
        """In the order in which they began to wait."""
        self._looked_at = -inf
        self.changes = 0
        """Rises when somebody who waits may be told something else because of another who does."""

    def any(self, now: float) -> bool:
        """Whether somebody waits who can be promised one."""
        self._forget(now)
        return not all(wait.hopeless for wait in self._waits.values())

    def look(self, now: float) -> None:
        """Takes in what time alone brings: who has waited for long enough, who has stopped asking."""
        self._forget(now)
        before, self._looked_at = self._looked_at, now
        if any(before < wait.since + self._patience_s <= now for wait in self._waits.values()):
            self.changes += 1

    def next_at(self, now: float) -> float:
        """When that is the next time; +inf: never."""
        patient = (at for wait in self._waits.values() if (at := wait.since + self._patience_s) > now)
        forgotten = (wait.asks_until + FORGOTTEN_S for wait in self._waits.values())
        return min([*patient, *forgotten], default=inf)

    def ask(
        self, model: Model, there: GroupIndex, now: float, only: str | None = None, holds_s: float = 0.0
    ) -> ActivationPlan:
        """Where to bring up a model that is active nowhere, and who has to leave for it (`GroupIndex.activate`); while
        it has to wait it asks again. `holds_s`: for so long it does, though nothing need be heard of it."""
        self._forget(now)
        answer = there.activate(model, only, self._closed(model.name))
        if not isinstance(answer.outcome, Wait):
            return answer
        wait = self._waits.setdefault(model.name, _Wait(now, now))
        wait.asks_until = now + holds_s
        waited_s, before = now - wait.since, (wait.group, wait.hopeless)
        if wait.group not in there:
            wait.group = ""  # it is lost
        if self._is_next(model.name, now):
            wait.group = there.to_reserve(model, only, self._closed(model.name)) or ""
            wait.hopeless = not wait.group and there.to_reserve(model, only) is None
        if (wait.group, wait.hopeless) != before:
            self.changes += 1
        if not wait.group:
            return answer
        told = f"{answer.outcome.reason}; {wait.group} is promised to it, which has waited for {waited_s:.1f} s"
        if kept := there.keep(model, waited_s, wait.group):
            wait.asks_until = now  # it asks no more, and is `served` unless its group refuses it
            return kept
        return replace(answer, outcome=Wait(model.name, told))

    def served(self, model: str) -> None:
        """It has its place."""
        if self._waits.pop(model, None) is not None:
            self.changes += 1

    def _forget(self, now: float) -> None:
        gone = [name for name, wait in self._waits.items() if now - wait.asks_until > FORGOTTEN_S]
        for name in gone:
            self.served(name)

    def _is_next(self, model: str, now: float) -> bool:
        """Whether a group is to be promised to it now: it has waited long enough, and all who waited before it for as
        long have theirs, or can have none."""
        for name, wait in self._waits.items():
            if name != model and wait.hopeless:
                continue
            if not wait.group and now - wait.since >= self._patience_s:
                return name == model
        return False

    def _closed(self, model: str) -> set[str]:
        """Groups that are promised to others."""
        return {wait.group for name, wait in self._waits.items() if wait.group and name != model}
