"""Which engine's decode steps go first if several engines of a group decode at once and there is not enough compute for
all: those of the engine that needs the least of the devices for each request that is to be on time.

The driver gives processes on a GPU equal slices, and a little is lost between them. Two engines that each need half of
the device thus get 0.45 of it, and both miss their targets by a tenth; with three, all do. The choice is the one that
Moore-Hodgson makes for first tokens: if there is not enough for all, leave out the requests that cost the most.

**The need** of an engine is the share of the devices that keeps its tightest target: seconds of a decode step alone
over the mean that the target allows (`PrefillThrottle.step_s`). If all bidding engines together need more than
`ENOUGH`, the engine that needs less for each of its requests goes first. Else they have equal slices: the engine that
goes first would take more than it needs, because with requests of a few tokens it can hardly know when it has enough.

**Whether it bids** depends on the TPOT slack of its requests (`tpot_slack.py`): an engine that need not begin a step
within the time of one makes no bid, and stands still while another engine bids. So it goes at the rate of its target
while neighbours need the rest, and as fast as it can while they do not. An engine whose requests can no longer be
brought on time does not bid either, and has what the others leave. But while late requests of its model wait, which can
start only when decodes end, an engine bids whatever its TPOT slack is (`PrefillThrottle.urgent`): at its target's rate
a queue may never end.

An engine that prefills, or stands still for a neighbour's prefill (`prefill_priority.py`), makes no bid meanwhile:
others would wait for steps that are not made.

An engine waits for `decode_arbitration_ms` at most and then makes a step (`step_gate.py`): a target that cannot
be kept is missed, but its streams never stop.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

ENOUGH = 0.9
"""Share of the devices that engines can use together in equal slices."""


class DecodeBid(NamedTuple):
    """The bid of one engine that decodes. Bids are compared: the least goes first."""

    each: float
    """Share of the devices that the engine needs for each of its requests."""
    place: int
    """Tells equal bids apart, the same way in every engine."""
    need: float


def bid(need: float, requests: int, place: int) -> DecodeBid:
    return DecodeBid(need / max(1, requests), place, need)


def need(step_s: float, target_step_s: float) -> float:
    """Share of the devices that an engine needs. `step_s`: seconds of a decode step alone, 0 if unknown;
    `target_step_s`: mean seconds that the target allows."""
    return step_s / target_step_s


def due(slack_s: float, step_s: float) -> bool:
    """Whether an engine bids: its next decode step has to begin within `slack_s` seconds, and one takes `step_s`."""
    return slack_s < step_s


def waits(own: DecodeBid, bids: bool, others: Collection[DecodeBid]) -> bool:
    """Whether an engine's next decode step waits for one of the `others`, which all bid. `bids`: whether the engine
    bids itself."""
    if not bids:
        return bool(others)
    return _crowded(own, others) and min(others, default=own) < own


def alone(own: DecodeBid, bids: bool, others: Collection[DecodeBid]) -> bool:
    """Whether a decode step that begins now has the devices to itself, so that its duration is a measurement of a step
    alone: the engine bids and comes first, or no other engine bids. Engines without a bid may or may not be
    decoding."""
    return bids and (not others or (_crowded(own, others) and own < min(others)))


def _crowded(own: DecodeBid, others: Collection[DecodeBid]) -> bool:
    """Whether the engines together need more than they can use of the devices."""
    return own.need + sum(other.need for other in others) > ENOUGH
