"""Whether an engine's next decode step waits for steps of others, by
`gpu_scheduler/engines/sharing/decode_arbitration.py` and `prefill_priority.py`: what `engines/sglang/ranks/ranks.py`
decides before each step of a real engine (`gives_way`). That is before the devices begin the previous step, which is
given to them then: a step that is decided follows whatever comes.

An engine that stands still looks again every `_LOOK_S` seconds, or when no prefill step goes first any more.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle
from sim.clock import Clock, Timer
from sim.engines.processor import Processor

_LOOK_S = 0.001
"""Seconds after which decodes that stand still look again whether they may go on: a real engine's `_TURN_LOOK_S`."""
_EXACT_S = 1e-9
"""Rounding error in seconds of sums of times on the clock."""


class DecodingEngine(Protocol):
    """An engine, as far as decode order is concerned."""

    pace: PrefillThrottle

    @property
    def batch(self) -> int:
        """Number of requests that decode."""
        ...

    @property
    def believed_s(self) -> float:
        """Seconds that a decode step takes alone, by the engine's own estimate."""
        ...

    @property
    def lead_s(self) -> float:
        """Seconds until the next decode step has to begin (`gpu_scheduler/engines/sharing/tpot_slack.py`)."""
        ...

    @property
    def prefills(self) -> bool:
        """Whether a prefill step is under way, or next."""
        ...

    def look(self) -> None:
        """Has the engine see whether it can go on."""
        ...

    def cut(self) -> None:
        """Has the engine decide on each step singly from now on: other engines decode too, or go first."""
        ...


class DecodeOrder:
    """The decode order as one engine follows it. It is registered at the processor from `begin` to `end`."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        engine: DecodingEngine,
        processor: Processor,
        prefill_priority_s: float,
        decode_arbitration_s: float,
    ) -> None:
        """`prefill_priority_s`: the most seconds that decodes wait for other engines' prefill steps;
        `decode_arbitration_s`: for their decode steps."""
        self.standing = False
        """Whether the decodes stand still."""
        self.last = False
        """Whether the next step was decided before another engine went first, which is waited for after it."""
        self._decided = False
        """Whether the next step is made, whatever comes until then."""
        self._clock = clock
        self._name = name
        self._engine = engine
        self._processor = processor
        self._prefill_priority_s = prefill_priority_s
        self._turn_s = decode_arbitration_s
        self._place = next(processor.places)
        self._behind_since = inf
        """Second since which the decodes have stood still for other engines' prefill steps; +inf if they do not."""
        self._look: Timer | None = None
        self._decoded_at = 0.0
        """Second at which the decodes last had the devices."""

    # --- what neighbours see

    @property
    def want(self) -> DecodeBid:
        step_s, target_s = self._engine.believed_s, self._engine.pace.step_s
        return decode_arbitration.want(decode_arbitration.need(step_s, target_s), self._engine.batch, self._place)

    @property
    def wants(self) -> bool:
        """Whether the engine bids for the devices. It does not while its own prefill step is under way or next, or
        another's stops it."""
        engine = self._engine
        if not engine.batch or engine.pace.step_s == 0 or self._processor.stands_still(engine.batch):
            return False
        if engine.prefills:
            return False
        return engine.pace.urgent or decode_arbitration.wants(engine.lead_s, engine.believed_s)

    def joined(self) -> None:
        if self._turn_s > 0:
            self._engine.cut()

    def claimed(self) -> None:
        if self._processor.stands_still(self._engine.batch):
            self._engine.cut()

    # --- for its engine

    def begin(self) -> None:
        """Notes that the engine has something to decode."""
        self._processor.decoding[self._name] = self
        for other in self._processor.decoding.values():
            if other is not self:
                other.joined()

    def end(self) -> None:
        """Notes that the engine has nothing to decode any more."""
        del self._processor.decoding[self._name]

    def forget(self) -> None:
        """Drops the next look of decodes that stand still."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._processor.wait_no_more(self._engine.look)

    def prefills(self) -> None:
        """Notes that the engine begins a prefill step."""
        self._behind_since = inf
        self._decided = False

    def begins(self) -> None:
        """Notes that the engine begins a decode step, or a run of them: with that the next step is decided."""
        self._decided = not self._waits()

    @property
    def step_by_step(self) -> bool:
        """Whether other engines decode too, so that each step is decided singly."""
        return len(self._processor.decoding) > 1 and self._turn_s > 0

    def stands_still(self) -> bool:
        """Whether the engine's next decode step waits for steps of others. If so it looks again when it need not wait,
        or soon."""
        self.forget()
        now, batch = self._clock.now, self._engine.batch
        decided, self._decided = self._decided, False
        self.last = decided and self._waits()
        if self.last:
            look_s = 0.0
        elif self._processor.stands_still(batch):
            self._behind_since = min(self._behind_since, now)
            look_s = self._behind_since + self._prefill_priority_s - now
            if look_s > _EXACT_S:
                self._processor.wait(batch, self._engine.look)
        elif self._gives_way():
            look_s = _LOOK_S
        else:
            look_s = 0.0
        self.standing = look_s > _EXACT_S
        if self.standing:
            self._look = self._clock.after(look_s, self._engine.look)
        else:
            self._behind_since, self._decoded_at = inf, now
        return self.standing

    def _waits(self) -> bool:
        """Whether a step that is decided on now would wait."""
        if self._processor.stands_still(self._engine.batch):
            return min(self._behind_since, self._clock.now) + self._prefill_priority_s - self._clock.now > _EXACT_S
        return self._gives_way()

    @property
    def undisturbed(self) -> bool:
        """Whether a decode step that begins now has the devices alone, as far as the engine knows
        (`gpu_scheduler/engines/sharing/solo_step_time.py`)."""
        others = [other for other in self._processor.decoding.values() if other is not self]
        if self._processor.goes_first or self._engine.pace.step_s == 0:
            return False
        return decode_arbitration.alone(self.want, self.wants, [other.want for other in others if other.wants])

    def _gives_way(self) -> bool:
        """Whether the engine's decodes give way to decodes of others."""
        others = [other for other in self._processor.decoding.values() if other is not self]
        if not others or self._turn_s == 0 or self._engine.pace.step_s == 0:
            return False
        if self._clock.now - self._decoded_at >= self._turn_s:
            return False
        wanting = [other.want for other in others if other.wants]
        return bool(wanting) and decode_arbitration.waits(self.want, self.wants, wanting)
