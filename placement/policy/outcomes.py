"""What became of models' requests: which models missed a target lately, and how often each is asked for again.

A model returns when a request comes after a second or more without any. How often it does is an average that decays,
over two minutes, ten minutes and an hour, whichever says most: a model that is asked for every half hour is known, and
one that has just begun to be asked for every half minute too. It counts on each of several groups by itself: a group of
a busy model may be without its requests for a second, so that returns of such a model are overrated while it is awake.

Misses of a model that several groups serve are told apart by group: it may be late on one and not on another. Those of
a model that one group serves go with it where it goes.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from math import exp, inf

LATELY_S = 20.0
"""Seconds for which a missed target counts: long enough for a placement that looks once a second, and for the models
that stand in each other's way to be asked for again."""
MISSES_S = 60.0
"""Seconds over which missed targets are averaged: the window of the models' rates."""
_FORGOTTEN_S = 10 * MISSES_S
"""Seconds after which misses on a group have decayed to nothing."""
_OVER_S = (120.0, 600.0, 3600.0)
"""Seconds over which returns are averaged."""


_SOON_S, _LIKELY = 60.0, 0.5
"""A model is to be awake that returns within so many seconds with more than this probability."""


@dataclass(slots=True)
class _Misses:
    at: float = -inf
    """Second at which a request was last seen to be late, or to have missed a target."""
    targets: float = 0.0
    """Targets missed, decaying over MISSES_S, as at `at`."""

    def add(self, missed: int, now: float) -> None:
        self.targets = _decayed(self.targets, now - self.at, MISSES_S) + missed
        self.at = now

    def lately(self, now: float) -> bool:
        return now - self.at < LATELY_S

    def per_s(self, now: float) -> float:
        return _decayed(self.targets, now - self.at, MISSES_S) / MISSES_S


_NONE = _Misses()


@dataclass(slots=True)
class _Record:
    misses: _Misses = field(default_factory=_Misses)
    on: dict[str, _Misses] = field(default_factory=dict)
    """Misses of the model's requests by name of the group."""
    at: float = 0.0
    """Second to which `returns` have decayed."""
    returns: tuple[float, ...] = (0.0,) * len(_OVER_S)

    def of(self, group: str | None) -> _Misses:
        """Misses on one group; None: on all of them."""
        return self.misses if group is None else self.on.get(group, _NONE)


class Outcomes:
    """The record of every model. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def expect(self, model: str, now: float, returns_per_s: float) -> None:
        """Counts `returns_per_s` returns a second for the hour before `now`; to be called before anything is
        observed."""
        if returns_per_s > 0.0:
            record = self._records.setdefault(model, _Record())
            record.returns = (*(0.0 for _ in _OVER_S[1:]), returns_per_s * _OVER_S[-1])
            record.at = now

    def observe(
        self, model: str, now: float, *, late: bool = False, missed: int = 0, returns: int = 0, group: str = ""
    ) -> None:
        """Takes in what the group of the name `group` reported of the model since the last call. `late`: whether a
        request waits and is late. `missed`: number of targets that requests missed. `returns`: how often the model
        returned."""
        if not (late or missed or returns):
            return
        record = self._records.setdefault(model, _Record())
        if late or missed:
            record.misses.add(missed, now)
            record.on.setdefault(group, _Misses()).add(missed, now)
            record.on = {name: misses for name, misses in record.on.items() if now - misses.at < _FORGOTTEN_S}
        if returns:
            record.returns = tuple(each + returns for each in _returns(record, now))
            record.at = now

    def missed(self, model: str, now: float, group: str | None = None) -> bool:
        """Whether a request of the model missed a target within LATELY_S; on one group, or on any (None)."""
        record = self._records.get(model)
        return record is not None and record.of(group).lately(now)

    def missed_per_s(self, model: str, now: float, group: str | None = None) -> float:
        """Targets that the model's requests miss, each second; on one group, or on all together (None)."""
        record = self._records.get(model)
        return 0.0 if record is None else record.of(group).per_s(now)

    def returns_per_s(self, model: str, now: float) -> float:
        """How often the model is expected to return, each second."""
        record = self._records.get(model)
        if record is None:
            return 0.0
        return max(each / over for each, over in zip(_returns(record, now), _OVER_S, strict=True))

    def keep(self, models: Container[str]) -> None:
        """Forgets all models but these."""
        self._records = {name: record for name, record in self._records.items() if name in models}


def _returns(record: _Record, now: float) -> list[float]:
    return [_decayed(each, now - record.at, over) for each, over in zip(record.returns, _OVER_S, strict=True)]


def _decayed(amount: float, passed_s: float, over_s: float) -> float:
    return amount * exp(-max(0.0, passed_s) / over_s)


def will_return(outcomes: Outcomes, model: str, now: float) -> bool:
    """Whether the model will be asked for again soon, more likely than not, if its returns are independent."""
    return exp(-_SOON_S * outcomes.returns_per_s(model, now)) < 1 - _LIKELY
