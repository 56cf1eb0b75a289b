"""A line of waiting requests by deadline, or by arrival, kept in parallel.

What a plan computes with are machine numbers, the sequence numbers among them that say who it is: of 10,000 requests
it touches no object, numpy sees the numbers without a copy of each. An insertion moves at most n numbers or pointers in
each list (a few microseconds at 10,000), a search is a bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Key = tuple[float, float, int]
"""(deadline, arrival, sequence number), or arrival first: unique, and its order is that of the line."""
Array = NDArray[np.float64]
Classes = NDArray[np.int64]
Seqs = NDArray[np.int64]
"""Sequence numbers of requests."""


class RequestColumns:
    """Requests by key."""

    __slots__ = ("_classes", "_left_out", "_seconds", "_seqs", "_times", "_tokens", "keys", "left_out")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.left_out = 0
        """Of how many `leave_out` was said."""
        self._times = array("d")
        self._seconds = array("d")
        self._tokens = array("d")
        self._seqs = array("q")
        self._classes = array("q")
        self._left_out = array("b")

    def __len__(self) -> int:
        return len(self.keys)

    def insert(self, key: Key, tokens: int, class_: int) -> None:
        """Add a request of `tokens` uncached tokens; `class_` indexes the rates that `costs` gets."""
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self._times.insert(i, key[0])
        self._seconds.insert(i, key[1])
        self._seqs.insert(i, key[2])
        self._tokens.insert(i, tokens)
        self._classes.insert(i, class_)
        self._left_out.insert(i, False)

    def remove(self, key: Key) -> None:
        """Take out the request with that key; KeyError if there is none."""
        i = self._index(key)
        self.left_out -= self._left_out[i]
        del self.keys[i], self._times[i], self._seconds[i], self._seqs[i]
        del self._tokens[i], self._classes[i], self._left_out[i]

    def before(self, time: float) -> list[int]:
        """Those whose times are earlier."""
        return self._seqs[: bisect_left(self._times, time)].tolist()

    def leave_out(self, mask: NDArray[np.bool_]) -> None:
        """These, and no others, are left out of S from now on, for as long as they are here."""
        self._left_out = array("b", mask.tobytes())
        self.left_out = int(np.count_nonzero(mask))

    def is_left_out(self, key: Key) -> bool:
        """KeyError if there is none with that key."""
        return bool(self._left_out[self._index(key)])

    def _index(self, key: Key) -> int:
        i = bisect_left(self.keys, key)
        if i == len(self.keys) or self.keys[i] != key:
            raise KeyError(key)
        return i

    # Copies: an array that somebody looks into cannot grow.

    def times(self) -> Array:
        """The first part of each key."""
        return np.array(self._times)

    def seconds(self) -> Array:
        """The second part of each key."""
        return np.array(self._seconds)

    def seqs(self) -> Seqs:
        """Who it is: the third part of each key."""
        return np.array(self._seqs)

    def classes(self) -> Classes:
        return np.array(self._classes, np.int64)

    def costs(self, rates: Array) -> Array:
        """Seconds of prefill of each request; `rates` are seconds per token by class."""
        return np.array(self._tokens) * rates[self.classes()]
