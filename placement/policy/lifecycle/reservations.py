"""Reservations: groups for models that want a place where all are busy.

A model that found no room waits. When it has waited for `patience_s` seconds a group is reserved for it: no other model
comes up there until it has, so that room which comes free is not taken by models that need less. As soon as the models
there that have been awake for a quantum suffice to make room, they leave (`preemption.py`): as few as suffice, chosen
models that another group serves too first, then by the fewest requests that can still be on time, then by the
longest time awake. They then wait like any other.

So with k models that always have requests, on a group that is reserved for one after the other, a model waits at most

    patience + (k - 1) (quantum + change)

where `change` is the time that a drain, a wake-up and the next look at the group take together. Each of the other
models has the reservation at most once before this one, since a model that has left and wants to return waits behind
it. A model that has the reservation waits until the youngest model of the group has had its quantum. (Pinned models
never give up their place; what is left must hold the model. For a model that no group could hold beside them there is
no bound, and those behind it do not wait for it.)

Times are seconds on the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from placement.policy.kvpr import Model
from placement.policy.lifecycle.activation_plan import ActivationPlan
from placement.policy.lifecycle.decisions import Wait
from placement.policy.lifecycle.group_index import GroupIndex

FORGOTTEN_S = 5.0
"""Seconds after which a model that has not asked again counts as having stopped."""


@dataclass(slots=True)
class _Wait:
    since: float
    asks_until: float
    group: str = ""
    """Name of the group that is reserved for the model; empty: none."""
    hopeless: bool = False
    """Whether no group could be reserved for the model: it holds up no other."""


class Reservations:
    """Which models wait, since when, and for which group. There is one object for all groups of one size."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waits: dict[str, _Wait] = {}
        """Model -> its wait, in the order in which the waits began."""
        self._looked_at = -inf
        self.changes = 0
        """Rises when the answer to a waiting model may have changed because of another one that waits."""

    def any(self, now: float) -> bool:
        """Whether a model waits for which a group can be reserved."""
        self._forget(now)
        return not all(wait.hopeless for wait in self._waits.values())

    def look(self, now: float) -> None:
        """Takes in what time alone brings: models that have waited for long enough, and models that have stopped
        asking."""
        self._forget(now)
        before, self._looked_at = self._looked_at, now
        if any(before < wait.since + self._patience_s <= now for wait in self._waits.values()):
            self.changes += 1

    def next_at(self, now: float) -> float:
        """Second at which time alone next changes something; +inf if it never does."""
        patient = (at for wait in self._waits.values() if (at := wait.since + self._patience_s) > now)
        forgotten = (wait.asks_until + FORGOTTEN_S for wait in self._waits.values())
        return min([*patient, *forgotten], default=inf)

    def ask(
        self,
        model: Model,
        there: GroupIndex,
        now: float,
        only: str | None = None,
        holds_s: float = 0.0,
        first: str | None = None,
    ) -> ActivationPlan:
        """Where to bring up a model that is active nowhere, and which models have to leave for it
        (`GroupIndex.activate`). While it has to wait the caller asks again. `only`: name of the one group that it may
        be on. `holds_s`: seconds for which the model counts as waiting although it does not ask again. `first`: name of
        the group where it belongs."""
        self._forget(now)
        answer = there.activate(model, only, self._closed(model.name), first)
        if not isinstance(answer.outcome, Wait):
            return answer
        wait = self._waits.setdefault(model.name, _Wait(now, now))
        wait.asks_until = now + holds_s
        waited_s, before = now - wait.since, (wait.group, wait.hopeless)
        if wait.group not in there:
            wait.group = ""  # the group is lost
        if self._is_next(model.name, now):
            wait.group = there.to_reserve(model, only, self._closed(model.name)) or ""
            wait.hopeless = not wait.group and there.to_reserve(model, only) is None
        if (wait.group, wait.hopeless) != before:
            self.changes += 1
        if not wait.group:
            return answer
        told = f"{answer.outcome.reason}; {wait.group} is reserved for it, which has waited for {waited_s:.1f} s"
        if kept := there.keep(model, waited_s, wait.group):
            wait.asks_until = now  # it asks no more, and is `served` unless its group refuses it
            return kept
        return replace(answer, outcome=Wait(model.name, told))

    def served(self, model: str) -> None:
        """Ends the model's wait: it has its place."""
        if self._waits.pop(model, None) is not None:
            self.changes += 1

    def _forget(self, now: float) -> None:
        gone = [name for name, wait in self._waits.items() if now - wait.asks_until > FORGOTTEN_S]
        for name in gone:
            self.served(name)

    def _is_next(self, model: str, now: float) -> bool:
        """Whether a group is to be reserved for the model now: it has waited long enough, and all models that have
        waited as long and began before it have theirs, or can have none."""
        for name, wait in self._waits.items():
            if name != model and wait.hopeless:
                continue
            if not wait.group and now - wait.since >= self._patience_s:
                return name == model
        return False

    def _closed(self, model: str) -> set[str]:
        """Names of groups that are reserved for other models."""
        return {wait.group for name, wait in self._waits.items() if wait.group and name != model}
