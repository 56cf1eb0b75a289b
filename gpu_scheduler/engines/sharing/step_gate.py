"""The step gate: may this engine launch this step now? One object answers for an engine, for all of its ranks, and in
the simulator.

- A **prefill step** waits for the end of the pause behind the last one (`throttle.py`), and for decode steps of its own
  engine whose requests are behind their TPOT target (`tpot_slack.py`), unless these wait themselves.
- A **decode step** waits for prefill steps of neighbour engines (`prefill_priority.py`), and for decode steps of
  neighbours that go first (`decode_arbitration.py`), for a bounded time from the moment at which it might have begun.

The gate has no clock and reads no board: its caller passes the time in seconds, on any clock that only rises, and what
is known of the neighbours and of the requests that decode. The ranks of an engine must act alike, so one of them asks
the gate about decode steps and neighbours, and all go by its answer (`StepAnswer`); the rest follows from events that
all ranks see alike.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.prefill_priority import worth
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import DecodeWindow


class WaitReason(enum.Enum):
    """Why a step waits."""

    PAUSE = "the pause after the last prefill step"
    OWN_DECODES = "its own decode steps, which are behind their target"
    NEIGHBOUR_PREFILL = "a prefill step of another engine"
    NEIGHBOUR_DECODES = "decode steps of another engine"


class StepWait(NamedTuple):
    """The answer to a step that may not begin now."""

    until: float
    """Second at which it may begin at the latest, if nothing else comes; +inf: that cannot be said yet."""
    why: WaitReason


class Neighbours(NamedTuple):
    """The other engines on the same devices, and how long steps wait for theirs."""

    prefill_priority_s: float = 0.0
    """Most seconds that decode steps wait for prefill steps of others."""
    prefill_priority_batch: int = 0
    """A decode step waits for others' prefill steps only if it has at most that many requests for each of their
    prompts; 0: whatever it has."""
    decode_arbitration_s: float = 0.0
    """Most seconds that decode steps wait for decode steps of others."""
    prompts: int = 0
    """Prompts for which other engines claim the devices; 0: no prefill step goes first."""
    bids: Sequence[DecodeBid] = ()
    """Bids of other engines for decode steps."""


class Decodes(NamedTuple):
    """The requests of an engine that decode."""

    requests: int = 0
    begin_by: float = inf
    """Second by which the next decode step has to begin for every next token to be in time; +inf: no bound."""
    step: DecodeStep = DecodeStep()
    """How long a decode step takes alone."""


class StepAnswer(NamedTuple):
    """The part of the gate's answers that all ranks of an engine have from one of them."""

    throttle: PrefillThrottle = FREE
    decode: StepWait | None = None
    """None: the next decode step may begin."""
    solo_step: DecodeStep = DecodeStep()
    """How long a decode step takes alone, as that rank knows it."""


class StepGate:
    """The gate of one engine. Call `look` at the beginning of each turn of the engine's loop: prefill steps begin and
    end at the time of the last look."""

    def __init__(self, bid_of: Callable[[float, int], DecodeBid]) -> None:
        """`bid_of(need, requests)`: this engine's bid as its neighbours see it."""
        self.throttle = FREE
        self.undisturbed = False
        """Whether a decode step that `decode` was asked about last has the devices to itself, as far as is known."""
        self._bid_of = bid_of
        self._now = 0.0
        self._under_way: deque[float] = deque()
        """Second at which each prefill step under way was given to the devices. They end in this order."""
        self._ending_began_at: float | None = None
        """Second at which the prefill step began that ends with the next `look`; None: there is none."""
        self._ended_at = -inf
        self._took_s = 0.0
        self._window = DecodeWindow()
        self._claims = False
        """Whether a prefill step is under way, or the next one begins at once."""
        self._waiting_since = inf
        """Second since which decode steps have waited; +inf if none has since the last step."""
        self._behind_prefill = False
        """Whether decode steps wait for a prefill step of another engine."""

    # --- events

    def look(self, now: float, throttle: PrefillThrottle) -> bool:
        """Sets the time and the throttle. Returns whether slacks that were computed before are out of date: a prefill
        step has ended, or the target is another one."""
        outdated = throttle.step_s != self.throttle.step_s
        self._now, self.throttle = now, throttle
        if self._ending_began_at is not None:
            # A step behind another one began when that one ended.
            self._took_s = now - max(self._ending_began_at, self._ended_at)
            self._ended_at = now
            self._ending_began_at = None
            self._window.prefilled(now, self._took_s)
            outdated = True
        return outdated

    def prefill_began(self) -> None:
        """A prefill step was given to the devices. Another one may be formed while it runs."""
        self._under_way.append(self._now)
        self._waiting_since = inf
        self._claims = True

    def prefill_ended(self) -> None:
        """The results of the oldest prefill step are here; it counts as ended at the next `look`."""
        self._ending_began_at = self._under_way.popleft()

    def no_prefill_next(self) -> None:
        """No prefill step begins at once behind the one that has ended."""
        self._claims = False

    def decode_began(self) -> None:
        """A decode step was given to the devices: the next one may wait as long again."""
        self._waiting_since = inf

    @property
    def is_prefilling(self) -> bool:
        """Whether a prefill step is under way."""
        return bool(self._under_way)

    # --- answers

    def pause(self, now: float, ratio: float) -> StepWait | None:
        """The rest of the pause after the last prefill step, for a throttle with this `pause_ratio`; None: it is over.
        The pause is a multiple of the step's duration, so while one runs its end cannot be said."""
        if ratio > 0:
            if self._under_way or self._ending_began_at is not None:
                return StepWait(inf, WaitReason.PAUSE)
            if (until := self._ended_at + ratio * self._took_s) > now:
                return StepWait(until, WaitReason.PAUSE)
        return None

    def decodes_first(self, now: float, decodes: Decodes) -> StepWait | None:
        """Whether decode steps of the engine itself come before its next prefill step. They hold up none if they wait
        themselves (`decode`). While a prefill step runs it cannot be said for how long they come first."""
        if self._has_target(decodes) and decodes.begin_by < now:
            if self._under_way:
                return StepWait(inf, WaitReason.OWN_DECODES)
            # An engine that may need more than it seems to is not treated as cheap.
            need = self._need(decodes) if decodes.step.measured else 1.0
            if (left_s := self._window.left_s(now, need)) > 0:
                return StepWait(now + left_s, WaitReason.OWN_DECODES)
        return None

    def decode(self, now: float, neighbours: Neighbours, decodes: Decodes) -> StepWait | None:
        """Whether a decode step waits now; None: it may begin. The wait is bounded from the first time that this was
        asked since the last step."""
        self.undisturbed = self._behind_prefill = False
        if worth(neighbours.prompts, decodes.requests, neighbours.prefill_priority_batch):
            wait = self._wait(now, neighbours.prefill_priority_s, WaitReason.NEIGHBOUR_PREFILL)
            self._behind_prefill = wait is not None
            return wait
        if not self._has_target(decodes):
            return None
        own, bids = self.own_bid(decodes), self.wants(now, decodes)
        self.undisturbed = not neighbours.prompts and decode_arbitration.alone(own, bids, neighbours.bids)
        if not decode_arbitration.waits(own, bids, neighbours.bids):
            return None
        return self._wait(now, neighbours.decode_arbitration_s, WaitReason.NEIGHBOUR_DECODES)

    def _wait(self, now: float, most_s: float, why: WaitReason) -> StepWait | None:
        """Waited time counts until a step is made: between two claims there may be time to look and none to make
        one."""
        self._waiting_since = min(self._waiting_since, now)
        until = self._waiting_since + most_s
        return StepWait(until, why) if now < until else None

    # --- what neighbours see

    def wants(self, now: float, decodes: Decodes) -> bool:
        """Whether the decode steps are to be made before those of neighbours."""
        if not self._has_target(decodes):
            return False
        return self.throttle.urgent or decode_arbitration.due(decodes.begin_by - now, decodes.step.seconds)

    def bid(self, now: float, decodes: Decodes) -> float | None:
        """The share of the devices that the engine bids for, for its decode steps; None: it makes no bid. An engine
        that prefills, or whose decodes wait for a neighbour's prefill step, makes none meanwhile: neighbours would wait
        for a decode step that does not come."""
        if self._claims or self._behind_prefill or not self.wants(now, decodes):
            return None
        return self._need(decodes)

    def own_bid(self, decodes: Decodes) -> DecodeBid:
        """The engine's bid as its neighbours see it, if it makes one. There has to be a target."""
        return self._bid_of(self._need(decodes), decodes.requests)

    def _has_target(self, decodes: Decodes) -> bool:
        return decodes.requests > 0 and self.throttle.step_s > 0

    def _need(self, decodes: Decodes) -> float:
        """Share of the devices that the decoding requests need to meet their target."""
        return decode_arbitration.need(decodes.step.seconds, self.throttle.step_s)
