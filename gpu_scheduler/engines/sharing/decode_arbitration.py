"""Whose decode steps go first where several engines of a group decode at once and there is not enough for all: those
of who needs the least of the devices for each request that is to be on time.

The driver gives processes on a GPU equal slices, and a little is lost between them. Two engines of which each needs
half of the device thus get 0.45 of it, and both miss their targets by a tenth; of three all do. It is the choice that
Moore-Hodgson makes of first tokens: with not enough for all, leave out who costs the most.

**The need** of an engine is the share of the devices that keeps its tightest target: a decode step alone over the mean
that the target allows (`PrefillThrottle.step_s`). Where all that want something need more than `ENOUGH` together,
whoever needs less for each of its requests goes before. Else they have equal slices: who goes first would take more
than it needs, as it can hardly know when it has enough for a request of a few tokens.

**What it wants** is bounded by what its requests have in hand (`tpot_slack.py`): an engine that need not begin a step
within the time of one wants nothing more than others, and stands still while somebody does. So it goes at the pace of
its target while neighbours need the rest, and as fast as it can while they do not. One that nobody could bring in time
wants nothing, either, and has what the others leave. But while late requests of its model wait, which is for those that
decode to end, an engine wants more whatever is in hand (`PrefillThrottle.urgent`): at its target's pace a queue may
never end.

Whoever prefills, or stands still for who does (`prefill_priority.py`), wants nothing meanwhile: others would wait for
steps that are not made.

Whoever waits does so for `decode_turn_ms` at most and then makes a step (`prefill_priority.py`): a target that cannot
be kept is missed, its stream never stops.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

ENOUGH = 0.9
"""What engines can make of the devices in equal slices."""


class DecodeBid(NamedTuple):
    """Of one engine that decodes. They are compared: what is less goes before."""

    each: float
    """The need for each of its requests."""
    place: int
    """Tells equals apart, the same way for everybody."""
    need: float


def want(need: float, requests: int, place: int) -> DecodeBid:
    return DecodeBid(need / max(1, requests), place, need)


def need(step_s: float, target_step_s: float) -> float:
    """`step_s`: a decode step alone, 0 where that is not known; `target_step_s`: the mean that is allowed. Seconds."""
    return step_s / target_step_s


def wants(lead_s: float, step_s: float) -> bool:
    """Whether decodes whose next step has to begin within `lead_s` want more of the devices; one takes `step_s`."""
    return lead_s < step_s


def waits(own: DecodeBid, wanting: bool, others: Collection[DecodeBid]) -> bool:
    """Whether the next decode step waits for one of the `others`, who all want. `wanting`: whether it wants itself."""
    if not wanting:
        return bool(others)
    return _crowded(own, others) and min(others, default=own) < own


def alone(own: DecodeBid, wanting: bool, others: Collection[DecodeBid]) -> bool:
    """Whether a decode step that begins now has the devices for itself, so that what it takes says what it needs: the
    engine wants to be first and is, or nobody else wants to. Of those who want nothing it is not known whether they
    decode."""
    return wanting and (not others or (_crowded(own, others) and own < min(others)))


def _crowded(own: DecodeBid, others: Collection[DecodeBid]) -> bool:
    """Whether there is not enough for all."""
    return own.need + sum(other.need for other in others) > ENOUGH
