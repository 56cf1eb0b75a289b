"""Moves that bring models from their places to where Algorithm 1 wants them, as one feasible step after the other.

A migration keeps the source serving until the target is ready, so while it is under way the model is booked at both
places. The plan is a sequence of waves: the moves of one run side by side, at most `at_once` of them, and each finds
room at its target beside everything else, sources included; when the wave is through, its sources are free. Models with
the most demand go first. A move that can go in no wave (two models that want each other's place and no room beside
them) is held back with the bytes that it lacks: hibernating one of the models breaks the circle, and that is for the
caller to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from placement.policy.kvpr import Books, Group, Model, Place


@dataclass(frozen=True, slots=True)
class MoveRules:
    """Numbers of migration."""

    at_once: int = 1
    """The most migrations that may be under way together: each takes link bandwidth from models that serve."""
    cool_down_s: float = 60.0
    """Seconds that a model which moved stays at least."""


@dataclass(frozen=True, slots=True)
class Move:
    """A migration: prepare the target, switch the route, let the source finish, release it."""

    model: str
    source: Place
    target: Place


@dataclass(frozen=True, slots=True)
class DeferredMove:
    """A move that is wanted and not planned, and why."""

    model: str
    target: Place
    reason: str


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Moves in waves. `waves[0]` may begin now; it is empty while moves that are under way have to end first."""

    waves: tuple[tuple[Move, ...], ...]
    held: tuple[DeferredMove, ...]

    @property
    def moves(self) -> list[Move]:
        """All moves in order."""
        return [move for wave in self.waves for move in wave]


def plan_moves(
    groups: Sequence[Group],
    booked: Sequence[tuple[Model, Place]],
    target: Mapping[str, Place],
    now: float,
    rules: MoveRules | None = None,
    *,
    moved_at: Mapping[str, float] | None = None,
    under_way: Sequence[Move] = (),
    enough: Callable[[tuple[Move, ...]], bool] = lambda wave: False,
) -> MovePlan:
    """Plans how to bring the models of `booked` to their places in `target` (models not named there stay).

    `booked` is all that holds memory. A model may be there more than once: asleep beside its active place, which is the
    one that moves, or active twice in the middle of a move, in which case it is left alone. `moved_at`: model -> second
    at which it last moved. `under_way`: moves that run already, with the model booked at its source; they count as part
    of the first wave. `enough` is called with each wave in turn; once it returns True, later moves are neither planned
    nor held.
    """
    rules = rules or MoveRules()
    moved_at = moved_at or {}
    books = Books(groups)
    movers: dict[str, list[tuple[Model, Place]]] = {}
    for model, place in booked:
        books.book(model, place.devices)
        known = movers.get(model.name, [])
        if not known or model.needed > known[0][0].needed:
            movers[model.name] = [(model, place)]
        elif model.needed == known[0][0].needed:
            known.append((model, place))
    models = {name: places[0][0] for name, places in movers.items()}
    for move in under_way:
        books.book(models[move.model], move.target.devices)

    held: list[DeferredMove] = []
    pending: list[Move] = []
    moving = {move.model for move in under_way} | {name for name, places in movers.items() if len(places) > 1}
    for [(model, place), *_] in sorted(movers.values(), key=lambda known: (-known[0][0].demand, known[0][0].name)):
        to = target.get(model.name, place)
        if to == place or model.name in moving:
            continue
        left = moved_at.get(model.name, -inf) + rules.cool_down_s - now
        if model.pinned:
            held.append(DeferredMove(model.name, to, "it is pinned"))
        elif left > 0:
            held.append(DeferredMove(model.name, to, f"it moved lately, {left:.0f} s of its cool-down are left"))
        else:
            pending.append(Move(model.name, place, to))

    waves: list[tuple[Move, ...]] = []
    running = list(under_way)
    while pending:
        wave: list[Move] = []
        waiting: list[Move] = []
        for move in pending:
            model = models[move.model]
            has_slot = len(running) + len(wave) < rules.at_once
            if has_slot and all(books.fits(model, device) for device in move.target.devices):
                books.book(model, move.target.devices)
                wave.append(move)
            else:
                waiting.append(move)
        if not wave and not running:
            break
        waves.append(tuple(wave))
        for move in (*running, *wave):
            books.release(models[move.model], move.source.devices)
        running, pending = [], waiting
        if enough(waves[-1]):
            return MovePlan(tuple(waves), tuple(held))
    held += [DeferredMove(move.model, move.target, _lack(books, models[move.model], move)) for move in pending]
    return MovePlan(tuple(waves), tuple(held))


def _lack(books: Books, model: Model, move: Move) -> str:
    device = min(move.target.devices, key=books.free)
    return f"{device} has {books.free(device):,} bytes free, it needs {model.needed:,}, and no other move makes room"
