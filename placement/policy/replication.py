"""Replicas: further groups for a model whose load exceeds a group.

A model whose requests are late although most of the demand on its group is its own gains nothing by a move: it would
bring its load along. So it comes up on one more group beside those that it has, and gateways divide its requests among
them. It leaves one of them once its rate is so far below the one at which it was last short of groups that the others
can serve it.

Pure: times are seconds on the caller's clock, and nothing is carried out here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ReplicationRules:
    """When a model gets a further group, and when it loses one."""

    most: int = 4
    """The most groups that serve a model at once; 1: no replicas."""
    late_s: float = 2.0
    """Seconds for which the model has to be late on each of its groups."""
    least: int = 4
    """Least number of requests on a group that make the model late there."""
    window_s: float = 5.0
    """Seconds over which first tokens are counted, and for which a model that came up is not judged: its requests have
    waited for it."""
    share: float = 0.5
    """Share of the demand on a group that has to be the model's own, on one of its groups at least. With less, a move
    helps."""
    calm: float = 0.7
    """A model leaves a group once its rate, divided by the number of groups that are left, is at most this share of the
    rate for each group at which it was last short."""
    stay_s: float = 60.0
    """Seconds for which a model that came up on a further group leaves none."""
    unknown_s: float = 600.0
    """Seconds without being short after which a model leaves a group if it is not known at which rate it is short:
    after a restart of placement, say."""
    again_s: float = 10.0
    """Seconds after a model was granted a further group before it is granted another one. It is twice as long after
    each that did not come up."""
    longest_again_s: float = 640.0
    """Most seconds that `again_s` grows to."""


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


@dataclass(slots=True)
class _Watched:
    """A replica, with what it reported of late."""

    since: float
    now: Replica
    past: deque[tuple[float, Replica]] = field(default_factory=deque)
    """Reports with the seconds at which they came, from the last one that is older than the window on."""

    def hear(self, replica: Replica, now: float, window_s: float) -> None:
        counts_anew = replica.met < self.now.met or replica.missed < self.now.missed
        if counts_anew or now - self.since < window_s:
            self.past.clear()
        self.now = replica
        self.past.append((now, replica))
        while len(self.past) > 1 and self.past[1][0] <= now - window_s:
            self.past.popleft()

    def is_late(self, now: float, rules: ReplicationRules) -> bool:
        """Whether the model is late there: so many of its waiting requests are, or so many first tokens in the window
        were, and more than were on time."""
        if now - self.since < rules.window_s:
            return False
        before = self.past[0][1]
        met, missed = self.now.met - before.met, self.now.missed - before.missed
        return self.now.waiting_late >= rules.least or missed >= max(rules.least, met + 1)


@dataclass(frozen=True, slots=True)
class _Grant:
    """A further group that a model was granted."""

    at: float
    groups: int
    """Number of groups that the model had before."""
    failures: int
    """Number of grants before this one, in a row, by which it did not come up."""


class Replication:
    """Which models are short of groups, and which have more than they need. Groups go by any name that is theirs
    alone."""

    def __init__(self, rules: ReplicationRules | None = None) -> None:
        self._rules = rules or ReplicationRules()
        self._replicas: dict[str, dict[str, _Watched]] = {}
        """Model -> group -> its replica there."""
        self._on: dict[str, frozenset[str]] = {}
        """Group -> the models that are active there."""
        self._short_since: dict[str, float] = {}
        """Model that is late on all its groups -> second since when."""
        self._short_at: dict[str, float] = {}
        """Model -> tokens per second for each of its groups at which it was last short of groups."""
        self._calm_since: dict[str, float] = {}
        """Model -> second at which it was last short, or came up on a further group."""
        self._grants: dict[str, _Grant] = {}
        """Model -> the last group that it was granted."""
        self._held: set[str] = set()
        """Models that leave none of their groups as not needed."""

    def heard(self, group: str, replicas: Mapping[str, Replica], now: float) -> None:
        """Takes in the models that are active on a group; none if the group is away."""
        gone = self._on.pop(group, frozenset()) - replicas.keys()
        for name in gone:
            del self._replicas[name][group]
            if not self._replicas[name]:
                del self._replicas[name]
        for name, replica in replicas.items():
            there = self._replicas.setdefault(name, {})
            if group not in there:
                there[group] = _Watched(now, replica)
                self._calm_since[name] = now
            there[group].hear(replica, now, self._rules.window_s)
        for name in {*gone, *replicas}:
            self._judge(name, now)
        if replicas:
            self._on[group] = frozenset(replicas)

    def _judge(self, name: str, now: float) -> None:
        there, rules = self._replicas.get(name, {}).values(), self._rules
        if there and all(each.is_late(now, rules) for each in there) and max(e.now.share for e in there) >= rules.share:
            self._short_since.setdefault(name, now)
            self._calm_since[name] = now
        else:
            self._short_since.pop(name, None)

    def groups(self, model: str) -> list[str]:
        """The groups where the model is active."""
        return list(self._replicas.get(model, ()))

    def crowded(self, now: float) -> set[str]:
        """Groups where a model is late: they have nothing to give to another one."""
        rules = self._rules
        return {
            group
            for there in self._replicas.values()
            for group, replica in there.items()
            if replica.is_late(now, rules)
        }

    def short(self, now: float) -> list[str]:
        """Models that are short of groups and may have one more, the longest first."""
        rules = self._rules
        found = [
            (since, name)
            for name, since in self._short_since.items()
            if now - since >= rules.late_s and len(self._replicas[name]) < rules.most and self._may_ask(name, now)
        ]
        return [name for _, name in sorted(found)]

    def _may_ask(self, name: str, now: float) -> bool:
        grant, rules = self._grants.get(name), self._rules
        if grant is None:
            return True
        failures = grant.failures + (len(self._replicas[name]) <= grant.groups)
        pause_s = rules.again_s * 2.0 ** min(failures - 1, 60) if failures else rules.again_s
        return now - grant.at >= min(rules.longest_again_s, pause_s)

    def granted(self, model: str, rate: float, now: float) -> None:
        """Notes that the model gets a further group. `rate`: its tokens per second on all its groups."""
        there, last = len(self._replicas.get(model, ())), self._grants.get(model)
        failures = last.failures + 1 if last is not None and there <= last.groups else 0
        keep_s = 2 * self._rules.longest_again_s
        self._grants = {name: grant for name, grant in self._grants.items() if now - grant.at < keep_s}
        self._grants[model] = _Grant(now, there, failures)
        self._short_at[model] = rate / max(1, there)

    def hold(self, model: str, held: bool) -> None:
        """Has the model leave none of its groups as not needed, or lets it again. This is an operator's order, and
        holds also while one of the groups is away."""
        (self._held.add if held else self._held.discard)(model)

    def holds(self, model: str) -> bool:
        """Whether the model leaves none of its groups as not needed."""
        return model in self._held

    def keep(self, models: Container[str]) -> None:
        """Forgets all models but these."""
        self._held = {name for name in self._held if name in models}
        self._forget_inactive()

    def _forget_inactive(self) -> None:
        """Forgets the rates and times of models that are active nowhere."""
        self._short_at = {name: at for name, at in self._short_at.items() if name in self._replicas}
        self._calm_since = {name: at for name, at in self._calm_since.items() if name in self._replicas}

    def surplus(
        self,
        now: float,
        rate: Callable[[str], float],
        going: Container[str] = (),
        most: Callable[[str], int] | None = None,
    ) -> list[tuple[str, str]]:
        """(model, group that it can do without): one that is in `going`, of groups that are to be emptied, else the one
        with the fewest of its requests. `rate`: tokens per second of a model on all its groups. `most`: the most groups
        that a model may have; None: as the rules say. A model that has more leaves one at once. The call is to be made
        every second or so, since it takes in the rates at which models with several groups are short."""
        found = []
        for name in [name for name, there in self._replicas.items() if len(there) > 1]:
            there, rules, tokens_per_s = self._replicas[name], self._rules, rate(name)
            leaves = min(there, key=lambda group: (group not in going, there[group].now.busy, group))
            if len(there) > (rules.most if most is None else most(name)):
                found.append((name, leaves))
                continue
            if name in self._held:
                continue
            if name in self._short_since:
                self._short_at[name] = max(self._short_at.get(name, 0.0), tokens_per_s / len(there))
                continue
            calm_s, known = now - self._calm_since[name], name in self._short_at
            enough = known and tokens_per_s <= rules.calm * self._short_at[name] * (len(there) - 1)
            if calm_s >= (rules.stay_s if enough or not tokens_per_s else rules.unknown_s) and (enough or not known):
                found.append((name, leaves))
        self._forget_inactive()
        return found
