"""The shared board: words of shared memory between a gpu_scheduler and its engines.

The first three words are how long decode steps wait for others' prefill steps at most, how long for others' decode
steps, and the batch of the first (`engines/sharing/prefill_priority.py`). Then come two words for each engine, its
prefill throttle: the most prompt tokens of its next prefill steps, with the pause after each for each second that it
took; and the mean that its own decode steps may take, and whether they are urgent. Engines read them between two steps,
which costs nothing; a message would wait for the step.

At the end are words that engines write themselves, because a message through the gpu_scheduler would come too late:
until when a prefill step of theirs goes before decode steps of the others, and for how many prompts
(`engines/sharing/prefill_priority.py`); and their decode bids: until when they bid, what share of the devices they
need, and for how many requests (`engines/sharing/decode_arbitration.py`).
"""

from __future__ import annotations

import mmap
import os
import struct

from gpu_scheduler.engines.sharing import decode_arbitration
from gpu_scheduler.engines.sharing.decode_arbitration import DecodeBid
from gpu_scheduler.engines.sharing.step_gate import Neighbours
from gpu_scheduler.engines.sharing.throttle import FREE, PrefillThrottle

MOST_INDEX = 20_000
"""Greatest index of an engine."""
_SETTINGS = struct.Struct("<I")
"""Each of the first words: most microseconds that decode steps wait for prefill steps; the most that they wait for
others' decode steps; and `prefill_priority_batch`."""
_THROTTLE = struct.Struct("<Q")
"""First throttle word of an engine: most tokens of a step in the lower half, 0 for no bound; the ratio of the pause, in
millionths, in the upper one."""
_STEP = struct.Struct("<Q")
"""Second throttle word of an engine: microseconds of its own mean decode step in the lower half, 0 for no bound; in the
upper one whether it is urgent."""
_EACH = _THROTTLE.size + _STEP.size
_HALF = (1 << 32) - 1
_PLACES = 64
"""Slots for claims and bids: engines whose indices differ by a multiple of this share one, and may end each other's."""
_CLAIM = struct.Struct("<Q")
"""A claim: the number of prompts in the lowest 16 bits, above them the end in microseconds of the monotonic clock; 0:
no claim."""
_CLAIMS = struct.Struct(f"<{_PLACES}Q")
_CLAIMS_AT = _EACH * (1 + MOST_INDEX)
_BIDS_AT = _CLAIMS_AT + _CLAIMS.size
"""Offset of the bids. Their layout is that of claims, with the need, in hundredths, in the lowest 8 bits, and the
requests in the next 8."""
_MOST_BYTE = (1 << 8) - 1
_MOST_LOW = (1 << 16) - 1
_BID_S = 0.05
"""Seconds for which a bid holds unless it is repeated, which happens with every step."""
_BYTES = _BIDS_AT + _CLAIMS.size


def create() -> int:
    """A descriptor of a new board, on which no engine waits for others; engines inherit it."""
    fd = os.memfd_create("prism-board")
    os.ftruncate(fd, _BYTES)
    return fd


class SharedBoard:
    """The mapped board. An aligned store of one word is seen whole by the other processes."""

    def __init__(self, fd: int, *, bid_s: float = _BID_S) -> None:
        """`bid_s`: seconds for which a bid made here holds."""
        self._bid_s = bid_s
        self._words = mmap.mmap(fd, _BYTES)

    def set_throttle(self, index: int, throttle: PrefillThrottle) -> None:
        """Sets the prefill throttle of the engine with `index`, until the next call."""
        millionths = min(_HALF, round(1e6 * throttle.pause_ratio))
        _THROTTLE.pack_into(self._words, _EACH * index, millionths << 32 | min(_HALF, throttle.chunk_tokens))
        step_us = max(0, min(_HALF, round(1e6 * throttle.step_s)))
        _STEP.pack_into(self._words, _EACH * index + _THROTTLE.size, throttle.urgent << 32 | step_us)

    def throttle(self, index: int) -> PrefillThrottle:
        """The prefill throttle of the engine with `index`."""
        return _throttle_of(self.throttle_words(index))

    def throttle_words(self, index: int) -> bytes:
        """The prefill throttle of the engine with `index`, as it is written on the board."""
        return self._words[_EACH * index : _EACH * index + _THROTTLE.size + _STEP.size]

    @property
    def prefill_priority_s(self) -> float:
        """Most seconds that decode steps of an engine wait for prefill steps of others; 0: they do not wait."""
        return int(_SETTINGS.unpack_from(self._words, 0)[0]) / 1e6

    @property
    def prefill_priority_batch(self) -> int:
        """Most requests, for each waiting prompt, of an engine that decodes and waits for prefill steps of others; 0:
        any number."""
        return int(_SETTINGS.unpack_from(self._words, 2 * _SETTINGS.size)[0])

    def set_prefill_priority(self, seconds: float, batch: int) -> None:
        """Sets `prefill_priority_s` and `prefill_priority_batch`, for all engines."""
        _SETTINGS.pack_into(self._words, 0, min(_HALF, round(1e6 * seconds)))
        _SETTINGS.pack_into(self._words, 2 * _SETTINGS.size, min(_HALF, batch))

    def claim(self, index: int, now: float, prompts: int) -> None:
        """Claims priority for a prefill step of the engine with `index` that goes to the device and that `prompts`
        prompts wait for. `now`: monotonic seconds."""
        if (seconds := self.prefill_priority_s) > 0:
            word = int(1e6 * (now + seconds)) << 16 | min(_MOST_LOW, prompts)
            _CLAIM.pack_into(self._words, _place(index), word)

    def release(self, index: int) -> None:
        """Ends the claim of the engine with `index`."""
        _CLAIM.pack_into(self._words, _place(index), 0)

    def claimed(self, index: int, now: float) -> int:
        """Number of prompts for which engines other than that with `index` have claims; 0: no claims."""
        words, own = _CLAIMS.unpack_from(self._words, _CLAIMS_AT), index % _PLACES
        # This runs before each decode step, and mostly there is no claim.
        if not any(words):
            return 0
        return sum(word & _MOST_LOW for place, word in enumerate(words) if word >> 16 > 1e6 * now and place != own)

    @property
    def decode_arbitration_s(self) -> float:
        """Most seconds that decode steps of an engine wait for decode steps of others; 0: they do not wait."""
        return int(_SETTINGS.unpack_from(self._words, _SETTINGS.size)[0]) / 1e6

    def set_decode_arbitration(self, seconds: float) -> None:
        """Sets `decode_arbitration_s`, for all engines."""
        _SETTINGS.pack_into(self._words, _SETTINGS.size, min(_HALF, round(1e6 * seconds)))

    def bid(self, index: int, need: float | None, now: float, requests: int = 1) -> None:
        """Makes a bid for the engine with `index`, which holds for `bid_s` from `now` (monotonic seconds). `need`:
        share of the devices that its `requests` decoding requests need; None: takes the bid back."""
        word = 0 if need is None else int(1e6 * (now + self._bid_s)) << 16 | _packed(need, requests)
        _CLAIM.pack_into(self._words, _place(index, _BIDS_AT), word)

    def bids(self, index: int, now: float) -> list[DecodeBid]:
        """The bids of engines other than that with `index`."""
        words, own = _CLAIMS.unpack_from(self._words, _BIDS_AT), index % _PLACES
        if not any(words):
            return []
        return [
            _unpacked(word & _MOST_LOW, place)
            for place, word in enumerate(words)
            if word >> 16 > 1e6 * now and place != own
        ]

    def neighbours(self, index: int, now: float) -> Neighbours:
        """The claims and bids of engines other than that with `index`, and how long its steps wait for them."""
        return Neighbours(
            self.prefill_priority_s,
            self.prefill_priority_batch,
            self.decode_arbitration_s,
            self.claimed(index, now),
            self.bids(index, now),
        )


class BoardSeat:
    """One engine's place on the board, and what it has written there."""

    def __init__(self, board: SharedBoard, index: int) -> None:
        self._board = board
        self._index = index
        self._has_bid = False
        self._words = b""
        self._throttle = FREE

    @property
    def throttle(self) -> PrefillThrottle:
        # It is read several times a step, and rarely another one.
        if (words := self._board.throttle_words(self._index)) != self._words:
            self._words, self._throttle = words, _throttle_of(words)
        return self._throttle

    def neighbours(self, now: float) -> Neighbours:
        return self._board.neighbours(self._index, now)

    def bid_of(self, need: float, requests: int) -> DecodeBid:
        """This engine's bid as others see it."""
        return bid_of(self._index, need, requests)

    def bid(self, need: float | None, now: float, requests: int) -> None:
        """Makes a bid, or takes the last one back (`need` None)."""
        if (need is not None or self._has_bid) and self._board.decode_arbitration_s > 0:
            self._board.bid(self._index, need, now, requests)
            self._has_bid = need is not None

    def claim(self, now: float, prompts: int) -> None:
        self._board.claim(self._index, now, prompts)

    def release(self) -> None:
        self._board.release(self._index)


def _throttle_of(words: bytes) -> PrefillThrottle:
    (word,), (own,) = _THROTTLE.unpack_from(words, 0), _STEP.unpack_from(words, _THROTTLE.size)
    return PrefillThrottle(word & _HALF, (word >> 32) / 1e6, (own & _HALF) / 1e6, bool(own >> 32))


def bid_of(index: int, need: float, requests: int = 1) -> DecodeBid:
    """The bid that others see if the engine with `index` makes one for that many requests."""
    return _unpacked(_packed(need, requests), index % _PLACES)


def _packed(need: float, requests: int) -> int:
    return min(_MOST_BYTE, requests) << 8 | min(_MOST_BYTE, round(1e2 * need))


def _unpacked(low: int, place: int) -> DecodeBid:
    return decode_arbitration.bid((low & _MOST_BYTE) / 1e2, low >> 8, place)


def _place(index: int, table: int = _CLAIMS_AT) -> int:
    return table + _CLAIM.size * (index % _PLACES)
