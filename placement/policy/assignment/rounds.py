"""Which moves are one change of the cluster, and whether that is worth making.

Moves are made one after the other, and everything is decided anew after each. Halfway through a change the pressures
may be worse than before it, and a decision made there may take back what was meant as the first of two moves, for ever.
So moves go in rounds: of all that are wanted the fewest after which the devices that they touch are better off. A round
is begun only if it can be made to its end, and a round that was begun is finished (`rebalance.py`).

Devices are better off if their pressures, in descending order, fall by more than tau somewhere and rise nowhere before
that. Devices that no move touches add the same to both sides, so each round makes the pressures of the whole cluster
lexicographically less: a constant load comes to rest.

Moves that have a device in common, or are joined by others that have, depend on each other; those of two such clusters
do not, and are judged by themselves.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from placement.policy.assignment.improve import STRICTLY
from placement.policy.assignment.moves import Move
from placement.policy.kvpr import Books, Group, Model, Place

Strain = tuple[int, float]
"""Strain of a device: the bytes that it lacks for what is booked, then its pressure."""


@dataclass(slots=True)
class _Joined:
    """Moves that depend on each other, in order, and the devices that they touch."""

    moves: list[Move] = field(default_factory=list)
    devices: set[str] = field(default_factory=set)


class Outlook:
    """The state after moves that are made one after the other; `booked` is all that holds memory before. Of a model
    that is there more than once (asleep beside its active place) the one with the most bytes moves."""

    def __init__(self, groups: Sequence[Group], booked: Iterable[tuple[Model, Place]]) -> None:
        self._books = Books(groups)
        self._models: dict[str, Model] = {}
        for model, place in booked:
            self._books.book(model, place.devices)
            known = self._models.get(model.name)
            if known is None or model.needed > known.needed:
                self._models[model.name] = model
        self._before: dict[str, Strain] = {}
        """Device -> its strain before the first move that touched it."""
        self._joined: dict[str, _Joined] = {}
        """Device -> the moves that depend on each other and touch it."""

    def make(self, moves: Iterable[Move]) -> None:
        for move in moves:
            joined = _Joined()
            for device in (*move.source.devices, *move.target.devices):
                self._before.setdefault(device, self._strain(device))
                other = self._joined.get(device, joined)
                if other is not joined:
                    joined.moves += other.moves
                    joined.devices |= other.devices
                    for each in other.devices:
                        self._joined[each] = joined
                joined.devices.add(device)
                self._joined[device] = joined
            joined.moves.append(move)
            model = self._models[move.model]
            self._books.release(model, move.source.devices)
            self._books.book(model, move.target.devices)

    def better(self, tau: float, of: Move | None = None) -> bool:
        """Whether the devices are better off than before. `of`: look only at the moves that depend on this one or that
        it depends on."""
        devices = self._before.keys() if of is None else self._joined[of.source.devices[0]].devices
        before = sorted((self._before[device] for device in devices), reverse=True)
        after = sorted(map(self._strain, devices), reverse=True)
        for (lacked, was), (lacks, becomes) in zip(before, after, strict=True):
            if lacks != lacked:
                return lacks < lacked
            if becomes < was * (1 - max(tau, STRICTLY)):
                return True
            if becomes > was * (1 + STRICTLY):
                return False
        return False

    def harms(self, tau: float, troubled: Container[str]) -> bool:
        """Whether a device lacks more memory than before, or has a pressure that rose too far: by more than tau on
        the devices `troubled`, above the highest that there was before on others."""
        highest = max((was for _, was in self._before.values()), default=0.0)
        for device, (lacked, was) in self._before.items():
            lacks, becomes = self._strain(device)
            if lacks > lacked or becomes > (was * (1 + tau) if device in troubled else max(was, highest)):
                return True
        return False

    def with_it(self, move: Move) -> list[Move]:
        """The moves made so far that depend on this one or that it depends on, itself among them, in order."""
        return list(self._joined[move.source.devices[0]].moves)

    def _strain(self, device: str) -> Strain:
        return max(0, -self._books.free(device)), self._books.pressure(device)
