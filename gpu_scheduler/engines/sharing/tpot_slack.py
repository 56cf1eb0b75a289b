"""TPOT slack: how long the next decode step of an engine can wait, from what each of its decoding requests has
received.

A TPOT target is a mean, (last - first) / (n - 1), so that a request is on time as long as its k-th token after the
first comes within k times the target after the first. Time gained by faster tokens is kept, however much, until the
request ends; when that is need not be known. **The TPOT slack** of an engine is the least of its requests' slacks: the
next step must begin within it for every next token to be in time. Two choices depend on it:

- An engine prefills or decodes, never both, and SGLang prefills as long as there is something to prefill: behind a
  queue that does not end, a request that has its first token never gets its second. While there is slack everything is
  as SGLang does it, prefill first. Without slack decode steps come first (`DecodeWindow`).
- Engines that have a slack of a step or more stand still for the decode steps of engines that have less
  (`decode_arbitration.py`). A request that has just got its first token has no slack, and one that ran alone for a
  second has half a second.

**Lost requests do not count.** A request is lost if it is behind by more than it can make good while it goes on for
twice as many tokens as it has already and `RECOVERY_TOKENS` more. It would keep its engine in a hurry, first tokens
waiting, and neighbours standing still, for nothing. If the target is below a step alone, every request without slack is
lost.

**At most** a ninth of the duration of the prefill step before it is spent on decode steps
(`ThrottleRules.own_least_share`), and more than one step only if they fit into it. Neighbours' decodes get three
quarters, their prefills one quarter. That share would cost more than it brings here: if even an engine that did nothing
else could not keep the target, because its neighbours decode too, every first token would wait for nothing; and an
engine that stands still for its neighbours loses its slack by that alone. But decodes that need no more than a third of
the devices for their target get up to a third of the time (`ThrottleRules.decode_first_max_share`): with a target of 50
ms and steps of 5 a ninth is a single step behind a prefill step of 60, and every request is late in the end, to save a
tenth of the first tokens' time.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from gpu_scheduler.engines.sharing.throttle import ThrottleRules

RECOVERY_RATIO = 2
RECOVERY_TOKENS = 12
"""A request has to be able to catch up within `RECOVERY_RATIO` tokens for each that it has, and `RECOVERY_TOKENS` more.
With a ratio of 1 or a half fewer targets are met (docs/lab/tuning.md)."""


class Stream(NamedTuple):
    """The progress of a request that decodes."""

    first_at: float
    """When the first token was out, in seconds."""
    tokens: int
    """Tokens after the first, those on their way included."""


def slack_s(streams: Iterable[Stream], now: float, step_s: float, target_s: float) -> float:
    """The TPOT slack: seconds until the next decode step has to begin; below 0: some next token is late already; +inf:
    no request decodes, or none can be brought on time. `step_s`: seconds of a step alone; `target_s`: mean seconds per
    step that the target allows."""
    spare_s = target_s - step_s
    least = inf
    for first_at, tokens in streams:
        one = first_at + tokens * target_s + spare_s - now
        if one < least and one >= -spare_s * (RECOVERY_RATIO * tokens + RECOVERY_TOKENS):
            least = one
    return least


class DecodeWindow:
    """How long an engine's decode steps may come before its next prefill step. Seconds, on the caller's clock."""

    def __init__(self) -> None:
        self._rules = ThrottleRules()
        self._ended_at = self._took_s = 0.0

    def prefilled(self, now: float, took_s: float) -> None:
        """A prefill step that took `took_s` ended at `now`."""
        self._ended_at, self._took_s = now, took_s

    def left_s(self, now: float, need: float) -> float:
        """Seconds left in which a decode step may begin; one that began in time runs to its end. `need`: seconds of a
        decode step alone over the mean that the target allows."""
        rules = self._rules
        share = rules.decode_first_max_share if need <= rules.decode_first_max_share else 1 - rules.own_least_share
        return max(0.0, self._ended_at + share / (1 - share) * self._took_s - now)
