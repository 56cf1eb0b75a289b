"""Greedy answers of two runs: where they part, and how close the two tokens were there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Tokens, and for each the log-probabilities of the best two (or more) by token."""

    tokens: Sequence[int]
    top: Sequence[Mapping[int, float]]


@dataclass(frozen=True)
class Parting:
    """The first token that differs, of one prompt."""

    prompt: int
    at: int
    token: int
    other: int
    gap: float
    """Between the log-probabilities of the two, as the run says that found them further apart; infinite if one was not
    among the best of both runs."""


def parting(prompt: int, one: Answer, two: Answer) -> Parting | None:
    """None for equal answers. One that is shorter differs where it ends."""
    if list(one.tokens) == list(two.tokens):
        return None
    common = min(len(one.tokens), len(two.tokens))
    at = next((i for i in range(common) if one.tokens[i] != two.tokens[i]), common)
    if at == common:
        return Parting(prompt, at, -1, -1, math.inf)
    a, b = one.tokens[at], two.tokens[at]
    gaps = [abs(top[a] - top[b]) if a in top and b in top else math.inf for top in (one.top[at], two.top[at])]
    return Parting(prompt, at, a, b, max(gaps))


def partings(one: Sequence[Answer], two: Sequence[Answer]) -> list[Parting]:
    found = (parting(number, a, b) for number, (a, b) in enumerate(zip(one, two, strict=True)))
    return [each for each in found if each is not None]


def widest(found: Sequence[Parting]) -> float:
    """The largest gap; 0 where nothing differs."""
    return max((each.gap for each in found), default=0.0)
