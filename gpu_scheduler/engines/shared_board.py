"""The prefill turn and the pace: words of shared memory between a gpu_scheduler and its engines.

The first word is whose turn it is: 0 means that anybody may prefill; otherwise only the engine with that index may
start a prefill step. Then come two words for each engine: the most prompt tokens of its next prefill steps with how
long the pause after each is, for each second that it took; and the mean that its own decode steps may take,
and whether they hurry. Engines read them between two steps, which costs nothing; a message would wait for the step.

At the end engines write themselves what the gpu_scheduler would hear of too late: until when a prefill step of theirs
goes before decode steps of the others, and for how many prompts (`engines/sharing/prefill_priority.py`); and until when
they want to decode, with how much of the devices they need for it, for how many requests
(`engines/sharing/decode_arbitration.py`).
"""

from __future__ import annotations

import mmap
import os
import struct

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.throttle import PrefillThrottle

ANYBODY = 0
MOST_INDEX = 20_000
"""Of an engine."""
_TURN = struct.Struct("<I")
_PRECEDENCE = struct.Struct("<I")
"""Behind the turn: microseconds. Behind that the same for the decode turn, and then the precedence's batch."""
_PACE = struct.Struct("<Q")
"""Tokens, 0 for no bound, in the lower half; the ratio of the pause, in millionths, in the upper one."""
_STEP = struct.Struct("<Q")
"""Microseconds in the lower half, 0 for no bound; in the upper one whether it is urgent."""
_EACH = _PACE.size + _STEP.size
_HALF = (1 << 32) - 1
_PLACES = 64
"""For claims: engines whose numbers differ by a multiple share one, and may end each other's."""
_CLAIM = struct.Struct("<Q")
"""How many prompts, in the lowest 16 bits, and above them the end, in microseconds of the monotonic clock; 0: none."""
_CLAIMS = struct.Struct(f"<{_PLACES}Q")
_CLAIMS_AT = _EACH * (1 + MOST_INDEX)
_WANTS_AT = _CLAIMS_AT + _CLAIMS.size
"""As claims are, with the need, in hundredths, in the lowest 8 bits, and the requests in the next ones."""
_MOST_BYTE = (1 << 8) - 1
_MOST_LOW = (1 << 16) - 1
_WANTED_S = 0.05
"""How long an engine wants without saying so again: it does with every step."""
_BYTES = _WANTS_AT + _CLAIMS.size


def create() -> int:
    """A descriptor of fresh words that let anybody prefill as it likes; engines inherit it."""
    fd = os.memfd_create("prism-turn")
    os.ftruncate(fd, _BYTES)
    return fd


class SharedBoard:
    """The words, mapped. An aligned store of one is seen whole."""

    def __init__(self, fd: int) -> None:
        self._words = mmap.mmap(fd, _BYTES)

    def give(self, index: int) -> None:
        """Lets only the engine with `index` prefill (ANYBODY: everyone)."""
        _TURN.pack_into(self._words, 0, index)

    @property
    def holder(self) -> int:
        return int(_TURN.unpack_from(self._words, 0)[0])

    def mine(self, index: int) -> bool:
        """Whether the engine with `index` may start a prefill step now."""
        return self.holder in (ANYBODY, index)

    def set_pace(self, index: int, pace: PrefillThrottle) -> None:
        """For the engine with `index`, until the next one."""
        millionths = min(_HALF, round(1e6 * pace.pause_ratio))
        _PACE.pack_into(self._words, _EACH * index, millionths << 32 | min(_HALF, pace.chunk_tokens))
        step_us = max(0, min(_HALF, round(1e6 * pace.step_s)))
        _STEP.pack_into(self._words, _EACH * index + _PACE.size, pace.urgent << 32 | step_us)

    def pace(self, index: int) -> PrefillThrottle:
        """What holds for the engine with `index` now."""
        (word,) = _PACE.unpack_from(self._words, _EACH * index)
        (own,) = _STEP.unpack_from(self._words, _EACH * index + _PACE.size)
        return PrefillThrottle(word & _HALF, (word >> 32) / 1e6, (own & _HALF) / 1e6, bool(own >> 32))

    @property
    def precedence_s(self) -> float:
        """How long decode steps of an engine wait at most for prefill steps of others; 0: not at all."""
        return int(_PRECEDENCE.unpack_from(self._words, _TURN.size)[0]) / 1e6

    @property
    def precedence_batch(self) -> int:
        """For how many requests, for each prompt, an engine decodes at most that waits for prefill steps of others; 0:
        however many."""
        return int(_PRECEDENCE.unpack_from(self._words, _TURN.size + 2 * _PRECEDENCE.size)[0])

    def set_precedence(self, seconds: float, batch: int) -> None:
        """For all engines."""
        _PRECEDENCE.pack_into(self._words, _TURN.size, min(_HALF, round(1e6 * seconds)))
        _PRECEDENCE.pack_into(self._words, _TURN.size + 2 * _PRECEDENCE.size, min(_HALF, batch))

    def claim(self, index: int, now: float, prompts: int) -> None:
        """A prefill step of the engine with `index` goes to the device, which so many prompts wait for. `now`:
        monotonic seconds."""
        if (seconds := self.precedence_s) > 0:
            word = int(1e6 * (now + seconds)) << 16 | min(_MOST_LOW, prompts)
            _CLAIM.pack_into(self._words, _place(index), word)

    def release(self, index: int) -> None:
        """It has ended."""
        _CLAIM.pack_into(self._words, _place(index), 0)

    def claimed(self, index: int, now: float) -> int:
        """For how many prompts engines other than that with `index` have claims; 0: there is none."""
        words, own = _CLAIMS.unpack_from(self._words, _CLAIMS_AT), index % _PLACES
        # Before each decode step, and mostly there is none.
        if not any(words):
            return 0
        return sum(word & _MOST_LOW for place, word in enumerate(words) if word >> 16 > 1e6 * now and place != own)

    @property
    def decode_turn_s(self) -> float:
        """How long decode steps of an engine wait at most for those of others; 0: not at all."""
        return int(_PRECEDENCE.unpack_from(self._words, _TURN.size + _PRECEDENCE.size)[0]) / 1e6

    def set_decode_turn(self, seconds: float) -> None:
        """For all engines."""
        _PRECEDENCE.pack_into(self._words, _TURN.size + _PRECEDENCE.size, min(_HALF, round(1e6 * seconds)))

    def want(self, index: int, need: float | None, now: float, requests: int = 1) -> None:
        """The engine with `index` wants to decode so many requests, for a moment from now on (monotonic seconds). None:
        it does not."""
        word = 0 if need is None else int(1e6 * (now + _WANTED_S)) << 16 | _told(need, requests)
        _CLAIM.pack_into(self._words, _place(index, _WANTS_AT), word)

    def wanting(self, index: int, now: float) -> list[DecodeBid]:
        """Engines other than that with `index` which want to decode."""
        words, own = _CLAIMS.unpack_from(self._words, _WANTS_AT), index % _PLACES
        if not any(words):
            return []
        return [
            _heard(word & _MOST_LOW, place)
            for place, word in enumerate(words)
            if word >> 16 > 1e6 * now and place != own
        ]


def wanted(index: int, need: float, requests: int = 1) -> DecodeBid:
    """What others see if the engine with `index` wants to decode so many requests."""
    return _heard(_told(need, requests), index % _PLACES)


def _told(need: float, requests: int) -> int:
    return min(_MOST_BYTE, requests) << 8 | min(_MOST_BYTE, round(1e2 * need))


def _heard(low: int, place: int) -> DecodeBid:
    return decode_arbitration.want((low & _MOST_BYTE) / 1e2, low >> 8, place)


def _place(index: int, table: int = _CLAIMS_AT) -> int:
    return table + _CLAIM.size * (index % _PLACES)
