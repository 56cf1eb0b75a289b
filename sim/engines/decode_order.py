"""When a simulated engine's next decode step waits for steps of others. The step gate decides
(`gpu_scheduler/engines/sharing/step_gate.py`), as it does for a real engine: before the devices begin the previous
step, which is given to them then. So a step that is decided follows whatever comes.

An engine that stands still looks again every `_LOOK_S` seconds, or when no prefill step goes first any more.
"""

from __future__ import annotations

from typing import Protocol

from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.step_gate import Decodes, Neighbours, StepGate, StepWait, WaitReason
from sim.clock import Clock, Timer
from sim.engines.processor import Processor

_LOOK_S = 0.001
"""Seconds after which decodes that stand still look again whether they may go on: a real engine's `_BOARD_LOOK_S`."""
_EXACT_S = 1e-9
"""Rounding error in seconds of sums of times on the clock."""


class DecodingEngine(Protocol):
    """An engine, as far as decode order is concerned."""

    gate: StepGate

    @property
    def batch(self) -> int:
        """Number of requests that decode."""
        ...

    @property
    def decodes(self) -> Decodes:
        """The requests that decode, as the step gate weighs them."""
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
        self.yielding = False
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
        self._decode_arbitration_s = decode_arbitration_s
        self._look: Timer | None = None

    # --- what neighbours see

    @property
    def bid(self) -> DecodeBid | None:
        """The engine's bid; None: it makes none. Neighbours see it at once, so a prefill step that is next counts as
        begun."""
        engine = self._engine
        if not engine.batch or engine.gate.throttle.step_s == 0 or self._processor.stands_still(engine.batch):
            return None
        if engine.prefills:
            return None
        decodes = engine.decodes
        return engine.gate.own_bid(decodes) if engine.gate.wants(self._clock.now, decodes) else None

    def joined(self) -> None:
        if self._decode_arbitration_s > 0:
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
        self._decided = False

    def begins(self) -> None:
        """Notes that the engine begins a decode step, or a run of them: with that the next step is decided."""
        self._engine.gate.decode_began()
        self._decided = self._wait() is None

    @property
    def step_by_step(self) -> bool:
        """Whether other engines decode too, so that each step is decided singly."""
        return len(self._processor.decoding) > 1 and self._decode_arbitration_s > 0

    def stands_still(self) -> bool:
        """Whether the engine's next decode step waits for steps of others. If so it looks again when it need not wait,
        or soon."""
        self.forget()
        decided, self._decided = self._decided, False
        wait = self._wait()
        self.last = decided and wait is not None
        self.yielding = wait is not None and not decided
        if self.yielding:
            assert wait is not None
            look_s = _LOOK_S
            if wait.why is WaitReason.NEIGHBOUR_PREFILL:
                look_s = wait.until - self._clock.now
                self._processor.wait(self._engine.batch, self._engine.look)
            self._look = self._clock.after(look_s, self._engine.look)
        return self.yielding

    def _wait(self) -> StepWait | None:
        """The gate's answer about a step that is decided on now."""
        now = self._clock.now
        others = [other for other in self._processor.decoding.values() if other is not self]
        bids = [bid for other in others if (bid := other.bid) is not None] if self._decode_arbitration_s > 0 else []
        neighbours = Neighbours(
            self._prefill_priority_s,
            self._processor.prefill_priority_batch,
            self._decode_arbitration_s,
            self._processor.prompts,
            bids,
        )
        engine = self._engine
        decodes = Decodes(engine.batch) if self._processor.stands_still(engine.batch) else engine.decodes
        wait = engine.gate.decode(now, neighbours, decodes)
        return None if wait is None or wait.until - now <= _EXACT_S else wait
