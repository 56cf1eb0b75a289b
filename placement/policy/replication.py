"""Replicas: further groups for a model whose load exceeds a group.

A model whose requests are late although most of the demand on its group is its own gains nothing by a move: it would
bring its load along. So it comes up on one more group beside those that it has, and gateways divide its requests among
them. It is let go from one of them once the rate at which it was last short of groups has fallen so far that the others
can serve the rest.

Pure: times are seconds on the caller's clock, and nothing is carried out here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class ReplicationRules:
    """When a model gets a further group, and when it loses one."""

    most: int = 4
    """The most groups that serve a model at once; 1: no replicas."""
    late_s: float = 2.0
    """Seconds for which some of its requests have to have been late on each of its groups."""
    share: float = 0.5
    """Share of the demand on each of its groups that has to be its own. With less, a move helps."""
    calm: float = 0.7
    """Share of the rate per group at which it was short of groups, to which the rate has to fall for each that is
    left."""
    stay_s: float = 60.0
    """Seconds for which a model that got a further group keeps all it has."""
    again_s: float = 10.0
    """Seconds after a model was granted a further group before it counts as short again: it may not have come up."""


@dataclass(frozen=True, slots=True)
class Replica:
    """What a group reports of a model that is active there."""

    share: float
    """Its share of the demand on the group, from 0 to 1."""
    waiting_late: int = 0
    """Number of its waiting requests that are late."""
    met: int = 0
    """Number of its first tokens that were on time, since the group began to count."""
    missed: int = 0
    """Number of its first tokens that were late, since then."""
    busy: int = 0
    """Number of its requests there, waiting and running."""

    def is_late(self, before: Replica | None, was_late: bool) -> bool:
        """Whether its requests are late: some that wait are, or most first tokens since the report `before` were. With
        no first tokens since then they are as late as before, as long as there are requests."""
        if self.waiting_late:
            return True
        met, missed = (
            (self.met, self.missed) if before is None else (self.met - before.met, self.missed - before.missed)
        )
        if before is None or min(met, missed) < 0 or met == missed == 0:
            return was_late and self.busy > 0
        return missed > met


class Replication:
    """Which models are short of groups, and which have more than they need."""

    def __init__(self, rules: ReplicationRules | None = None) -> None:
        self._rules = rules or ReplicationRules()
        self._replicas: dict[str, dict[str, Replica]] = {}
        """Model -> group -> its replica there."""
        self._late: set[tuple[str, str]] = set()
        """(model, group) of the replicas whose requests are late."""
        self._on: dict[str, Mapping[str, Replica]] = {}
        """Group -> the models that are active there, as last heard."""
        self._short_since: dict[str, float] = {}
        """Model that is short of groups now -> second since when."""
        self._short_at: dict[str, float] = {}
        """Model -> its token rate per group when it was last short of groups; for models with several groups."""
        self._got_at: dict[str, float] = {}
        """Model -> second at which it came up on its last further group."""
        self._granted_at: dict[str, float] = {}
        """Model -> second at which it was last granted a further group."""

    def heard(self, group: str, replicas: Mapping[str, Replica], now: float) -> None:
        """Takes in the models that are active on a group; none if the group is away."""
        for name in self._on.get(group, {}).keys() - replicas.keys():
            del self._replicas[name][group]
            self._late.discard((name, group))
            if len(self._replicas[name]) < 2:
                self._short_at.pop(name, None)
                self._got_at.pop(name, None)
            if not self._replicas[name]:
                del self._replicas[name]
        for name, replica in replicas.items():
            there = self._replicas.setdefault(name, {})
            if group not in there and there:
                self._got_at[name] = now
            if replica.is_late(there.get(group), (name, group) in self._late):
                self._late.add((name, group))
            else:
                self._late.discard((name, group))
            there[group] = replica
        for name in {**self._on.get(group, {}), **replicas}:
            self._judge(name, now)
        if replicas:
            self._on[group] = replicas
        else:
            self._on.pop(group, None)

    def _judge(self, name: str, now: float) -> None:
        there = self._replicas.get(name, {})
        alone = all(replica.share >= self._rules.share for replica in there.values())
        if there and alone and all((name, group) in self._late for group in there):
            self._short_since.setdefault(name, now)
        else:
            self._short_since.pop(name, None)

    def groups(self, model: str) -> list[str]:
        """Names of the groups where the model is active."""
        return list(self._replicas.get(model, {}))

    def short(self, now: float) -> list[str]:
        """Models that are short of groups, the longest first."""
        rules = self._rules
        found = [
            (since, name)
            for name, since in self._short_since.items()
            if now - max(since, self._granted_at.get(name, -inf) + rules.again_s - rules.late_s) >= rules.late_s
            and len(self._replicas[name]) < rules.most
        ]
        return [name for _, name in sorted(found)]

    def surplus(self, now: float, rate: Callable[[str], float]) -> list[tuple[str, str]]:
        """(model, group that it can do without): the one with the fewest of its requests. `rate`: tokens per second of
        a model on all its groups. To be asked once in a while: the highest rates at which models are short of groups
        are taken in by it."""
        found = []
        for name in self._several():
            there, now_at = self._replicas[name], rate(name)
            if name in self._short_since:
                self._short_at[name] = max(self._short_at.get(name, 0.0), now_at / len(there))
            elif now - self._got_at.get(name, now) >= self._rules.stay_s:
                left = len(there) - 1
                if now_at <= self._rules.calm * self._short_at.get(name, 0.0) * left or not now_at:
                    found.append((name, min(there, key=lambda group: (there[group].busy, group))))
        return found

    def granted(self, model: str, rate: float, now: float) -> None:
        """Notes that the model gets a further group. `rate`: its tokens per second."""
        self._granted_at = {name: at for name, at in self._granted_at.items() if now - at < self._rules.again_s}
        self._granted_at[model] = now
        self._short_at[model] = rate / max(1, len(self._replicas.get(model, {})))

    def _several(self) -> Iterable[str]:
        return [name for name, there in self._replicas.items() if len(there) > 1]
