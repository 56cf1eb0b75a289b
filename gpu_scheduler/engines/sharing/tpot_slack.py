"""How long the next decode step of an engine can wait: of each request that decodes, what it has had so far.

A TPOT target is a mean, (last - first) / (n - 1), so that a request is on time as long as its k-th token after the
first comes k times the target after that one. What comes faster is in hand, however much, until the request ends;
nobody needs to know when that is. **The lead** of an engine is the least that any of its requests has in hand: the next
step must begin within it for every next token to be in time. Two choices are made by it:

- An engine prefills or decodes, never both, and SGLang prefills as long as there is something to prefill: behind a
  queue that does not end, what has its first token never gets the second. While there is a lead everything is as
  without it, prefill first. Without one decode steps come first (`DecodeWindow`).
- Engines that have a lead of a step and more stand still for the decode steps of those that have not
  (`decode_arbitration.py`). What has just got its first token has nothing in hand, and what ran alone for a second half
  of it.

**Who is lost does not count.** A request that is behind by more than it can make good, if it goes on for twice as long
as it has already and `RECOVERY_TOKENS` more, would keep its engine in a hurry, its first tokens waiting, and neighbours
standing still, for nothing. Where the target is below a step alone that is everybody with nothing in hand.

**At most** a ninth of what the prefill step before took is spent on decode steps (`ThrottleRules.own_least_share`),
more than one step only within it. Neighbours get three quarters, their prefills one. Here that costs more than it
brings: where even an engine that did nothing else could not keep the target, because its neighbours decode too, every
first token would wait for nothing; and one that stands still for neighbours is without a lead by that alone. But
decodes that need no more than a third of the devices for their target get up to a third of the time
(`ThrottleRules.own_cheap`): with a target of 50 ms and steps of 5 a ninth is a single step behind a prefill step of 60,
and everybody is late in the end, for a tenth of the first tokens' time.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from gpu_scheduler.engines.sharing.throttle import ThrottleRules

RECOVERY_RATIO = 2
RECOVERY_TOKENS = 12
"""Tokens in which a request has to be able to make good what it is behind: so many for each that it has, and so many
more. With a ratio of 1 or a half less is met (docs/lab/tuning.md)."""


class Stream(NamedTuple):
    """A request that decodes."""

    first_at: float
    """When its first token was out. Seconds."""
    tokens: int
    """After that one, those on their way included."""


def lead_s(streams: Iterable[Stream], now: float, step_s: float, target_s: float) -> float:
    """Seconds until the next decode step has to begin; below 0: some next token is late already. +inf if nobody can be
    brought in time, or nobody decodes. `step_s`: a step alone; `target_s`: the mean that is allowed."""
    spare_s = target_s - step_s
    least = inf
    for first_at, tokens in streams:
        one = first_at + tokens * target_s + spare_s - now
        if one < least and one >= -spare_s * (RECOVERY_RATIO * tokens + RECOVERY_TOKENS):
            least = one
    return least


class DecodeWindow:
    """For how long an engine's decode steps may come before its next prefill step. Seconds, on the caller's clock."""

    def __init__(self, rules: ThrottleRules | None = None) -> None:
        self._rules = rules or ThrottleRules()
        self._ended_at = self._took_s = 0.0

    def prefilled(self, now: float, took_s: float) -> None:
        """A prefill step ended."""
        self._ended_at, self._took_s = now, took_s

    def left_s(self, now: float, need: float) -> float:
        """Decode steps are not broken off: one that began in time runs to its end. `need`: a decode step alone over the
        mean that is allowed."""
        rules = self._rules
        share = rules.decode_first_max_share if need <= rules.decode_first_max_share else 1 - rules.own_least_share
        return max(0.0, self._ended_at + share / (1 - share) * self._took_s - now)
