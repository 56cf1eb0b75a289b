"""Searches by halves over measurements that take long: where an attainment falls below a mark as the rate rises, and
the fewest GPUs that suffice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Generic, TypeVar

Point = TypeVar("Point")


@dataclass(frozen=True, slots=True)
class Aim(Generic[Point]):
    """A mark to be located: the rate at which `value` first falls below it, between two rates of which the higher is at
    most `width` times the lower."""

    value: Callable[[Point], float]
    mark: float
    width: float


@dataclass(frozen=True, slots=True)
class Crossing:
    """A rate, with `beyond` where the mark was not passed: ">" if it still held at this one, the highest that was
    tried, "<" if it did not hold at this one, the lowest."""

    rate: float
    beyond: str = ""

    def __str__(self) -> str:
        return f"{self.beyond}{self.rate:.2f}"


def first_crossing(values: Mapping[float, float], mark: float) -> Crossing:
    """Where the values, by rate, first fall below the mark from rate 1 on, linear between neighbours; where they are
    below it at rate 1 already, the highest rate under that to which it holds. What a search for something else found at
    lower rates, where a request or two decide, does not count."""
    bracket = _bracket(values, mark)
    if isinstance(bracket, Crossing):
        return bracket
    low, high = bracket
    above, below = values[low], values[high]
    return Crossing(low + (high - low) * (above - mark) / (above - below))


def _bracket(values: Mapping[float, float], mark: float) -> tuple[float, float] | Crossing:
    """The two neighbours between which the values fall below the mark, or the crossing if there are none."""
    rates = sorted(values)
    at = next((number for number, rate in enumerate(rates) if rate >= 1), len(rates) - 1)
    if values[rates[at]] < mark:
        for low, high in zip(reversed(rates[:at]), reversed(rates[1 : at + 1]), strict=True):
            if values[low] >= mark:
                return low, high
        return Crossing(rates[0], "<")
    for low, high in zip(rates[at:], rates[at + 1 :], strict=False):
        if values[high] < mark:
            return low, high
    return Crossing(rates[-1], ">")


def locate(
    measure: Callable[[float], Point],
    aims: Sequence[Aim[Point]],
    begin: float,
    step: float,
    least: float,
    most: float,
) -> dict[float, Point]:
    """The points that locate all aims, by rate. Goes down from `begin`, by a factor of `step` each time, until all aims
    hold, or `least` is passed; up until none does, or `most` is passed; then halves the brackets."""
    points = {begin: measure(begin)}

    def held(rate: float) -> list[bool]:
        return [aim.value(points[rate]) >= aim.mark for aim in aims]

    rate = begin
    while not all(held(rate)) and rate / step >= least:
        rate /= step
        points[rate] = measure(rate)
    rate = begin
    while any(held(rate)) and rate * step <= most:
        rate *= step
        points[rate] = measure(rate)
    for aim in aims:
        while True:
            bracket = _bracket({each: aim.value(point) for each, point in points.items()}, aim.mark)
            if isinstance(bracket, Crossing) or bracket[1] / bracket[0] <= aim.width:
                break
            rate = sqrt(bracket[0] * bracket[1])
            points[rate] = measure(rate)
    return dict(sorted(points.items()))


def fewest(holds: Callable[[int], bool], begin: int, most: int) -> int | None:
    """The fewest GPUs that suffice, one more of which suffice too: a number at which models happen to lie well is none
    to plan with. None where `most` do not. `begin`: the first number to be tried. Halves the numbers between one that
    does not suffice and one that does, so that holes below are not seen."""
    known: dict[int, bool] = {0: False}

    def suffices(number: int) -> bool:
        if number not in known:
            known[number] = holds(number)
        return known[number]

    high = begin
    while not suffices(high):
        if high == most:
            return None
        high = min(most, ceil(1.5 * high))
    low = max(number for number, held in known.items() if number < high and not held)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    while high < most and not suffices(high + 1):
        high += 2
        while high <= most and not suffices(high):
            high += 1
    return high if high <= most else None
