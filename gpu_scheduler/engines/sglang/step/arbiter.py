"""The step gate of this engine, asked with what its ranks agree on and what neighbours have on the shared board."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
from gpu_scheduler.engines.sglang.step.decode_progress import DecodeProgress
from gpu_scheduler.engines.shared_board import BoardSeat
from gpu_scheduler.engines.sharing.solo_step_time import DecodeStep
from gpu_scheduler.engines.sharing.step_gate import Decodes, StepAnswer, StepGate, StepWait
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle
from gpu_scheduler.engines.sharing.tpot_slack import Stream


class Arbiter:
    """Answers for one model of an engine, until it leaves. Answers hold for all ranks at the same step; those of
    `..._now` are for a rank that waits for them to change. While a model is being proven (`model/probe.py`: the few
    requests by which it is checked and measured) it waits for no neighbour and is not throttled."""

    def __init__(self, ranks: Ranks, seat: BoardSeat, proving: Callable[[], bool]) -> None:
        """`proving` tells whether the model is being proven now."""
        self.urgent = False
        """Whether the decode steps were to be made before those of neighbours when the bid was last made."""
        self.progress = DecodeProgress()
        self._ranks = ranks
        self._proving = proving
        self._seat = seat
        self._gate = StepGate(seat.bid_of)
        self._now = 0.0
        self._requests = 0
        """Requests that decode and go on."""
        self._solo_step = DecodeStep()
        ranks.ask(self._answer)

    def _answer(self) -> StepAnswer:
        return StepAnswer(self._seat.throttle, self._ask_now(), self._solo_step)

    def _ask_now(self) -> StepWait | None:
        """The gate's answer about the next decode step, with the bid that follows from it."""
        now = time.monotonic()
        decodes = self._decodes
        wait = self._gate.decode(now, self._seat.neighbours(now), decodes)
        self._bid(now, decodes)
        return wait

    # --- time and requests

    def look(self) -> None:
        """Takes the time and the throttle, before anything else in a step."""
        self._now = self._ranks.now()
        if self._gate.look(self._now, self.throttle):
            self.progress.mark_stale()

    def observe(self, streams: Iterable[Stream], least_s: float, now: float) -> None:
        """Takes the streams that decode. `least_s`: seconds of a decode step with one request alone."""
        self._solo_step = self.progress.solo_step(least_s, now)
        step = self._solo_step if self._ranks.size == 1 else self._ranks.answer.solo_step
        self.progress.observe(streams, now, step, self._gate.throttle.step_s)

    def decoding(self, requests: int, now: float) -> None:
        """Takes the number of requests that decode and go on, and tells neighbours."""
        self._requests = 0 if self._proving() else requests
        self._bid(now, self._decodes)

    @property
    def _decodes(self) -> Decodes:
        return self.progress.decodes(self._requests)

    def _bid(self, now: float, decodes: Decodes) -> None:
        self.urgent = self._gate.wants(now, decodes)
        self._seat.bid(self._gate.bid(now, decodes), now, decodes.requests)

    # --- answers

    @property
    def throttle(self) -> PrefillThrottle:
        """Throttle of the next prefill step."""
        if self._proving():
            return FREE
        return self._seat.throttle if self._ranks.size == 1 else self._ranks.answer.throttle

    def pause(self) -> StepWait | None:
        """The rest of the pause after the last prefill step."""
        return self._gate.pause(self._ranks.now(), self.throttle.pause_ratio)

    def pause_now(self) -> StepWait | None:
        """The rest of the pause by the clock and the throttle as they are now."""
        throttle = self._seat.throttle if self._ranks.rank == 0 else self.throttle
        return self._gate.pause(time.monotonic(), throttle.pause_ratio)

    def prefill(self, decoding: Callable[[], bool]) -> StepWait | None:
        """Whether the next prefill step waits. None: it may begin. `decoding` tells whether requests are to decode; it
        is called only if that matters, as it may have to look at all of them."""
        if (pause := self.pause()) is not None:
            return pause
        first = self._gate.decodes_first(self._ranks.now(), self.progress.decodes(1))
        return first if first is not None and decoding() and self.decode() is None else None

    def prefill_now(self) -> StepWait | None:
        """Whether the next prefill step would wait now, for a pause or for decode steps that come first, if these did
        not wait themselves."""
        return self.pause_now() or self._gate.decodes_first(time.monotonic(), self._decodes)

    def decode(self) -> StepWait | None:
        """Whether the next decode step waits for steps of neighbours. None: it may begin."""
        if self._proving():
            return None
        return self._ask_now() if self._ranks.size == 1 else self._ranks.answer.decode

    def decode_now(self) -> StepWait | None:
        """Whether the next decode step waits by what neighbours have on the board now."""
        return self._ask_now() if self._ranks.rank == 0 else self._ranks.answer.decode

    # --- steps

    def prefill_begins(self, prompts: int) -> None:
        """A prefill step goes to the devices; `prompts` prompts gain if decode steps of neighbours wait for it."""
        self._gate.prefill_began()
        self.progress.disturbed()
        self.claim(prompts)

    def prefill_ended(self) -> bool:
        """The results of a prefill step are here. Returns whether another one is under way."""
        self._gate.prefill_ended()
        return self._gate.is_prefilling

    def claim(self, prompts: int) -> None:
        """Claims the devices for the prefill step under way, or for one that begins at once."""
        now = time.monotonic()
        self._seat.claim(now, prompts)
        self._bid(now, self._decodes)

    def release(self) -> None:
        """Ends the claim."""
        self._gate.no_prefill_next()
        self._seat.release()

    def decode_begins(self) -> None:
        """A decode step goes to the devices."""
        self.progress.began(self._now, self._gate.undisturbed)
        self._gate.decode_began()
