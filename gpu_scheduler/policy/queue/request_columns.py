"""Waiting requests in order of deadline or of arrival, kept as parallel columns of numbers.

A plan computes with machine numbers alone, the sequence numbers that identify the requests included: for 10,000
requests it touches no object, and numpy reads each column in one block. An insertion moves at most n numbers or
pointers in each column (a few microseconds at 10,000), a search is a bisection.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

Key = tuple[float, float, int]
"""(deadline, arrival, sequence number); in `missed` (arrival, deadline, sequence number). Unique; requests lie in its
order."""
Array = NDArray[np.float64]
Classes = NDArray[np.int64]
Seqs = NDArray[np.int64]
"""Sequence numbers of requests."""


class RequestColumns:
    """Columns of requests in order of their keys."""

    __slots__ = ("_classes", "_left_out", "_seconds", "_seqs", "_times", "_tokens", "keys", "left_out")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.left_out = 0
        """Number of requests that the last `leave_out` marked."""
        self._times = array("d")
        self._seconds = array("d")
        self._tokens = array("d")
        self._seqs = array("q")
        self._classes = array("q")
        self._left_out = array("b")

    def __len__(self) -> int:
        return len(self.keys)

    def insert(self, key: Key, tokens: int, class_: int) -> None:
        """Adds a request of `tokens` uncached tokens; `class_` is its index into the rates that `costs` gets."""
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self._times.insert(i, key[0])
        self._seconds.insert(i, key[1])
        self._seqs.insert(i, key[2])
        self._tokens.insert(i, tokens)
        self._classes.insert(i, class_)
        self._left_out.insert(i, False)

    def remove(self, key: Key) -> None:
        """Removes the request with that key. Raises KeyError if there is none."""
        i = self._index(key)
        self.left_out -= self._left_out[i]
        del self.keys[i], self._times[i], self._seconds[i], self._seqs[i]
        del self._tokens[i], self._classes[i], self._left_out[i]

    def before(self, time: float) -> list[int]:
        """Sequence numbers of requests whose deadline (or arrival, where that leads the key) is before `time`."""
        return self._seqs[: bisect_left(self._times, time)].tolist()

    def leave_out(self, mask: NDArray[np.bool_]) -> None:
        """Marks the requests of `mask`, and no others, as left out of S from now on, for as long as they are here."""
        self._left_out = array("b", mask.tobytes())
        self.left_out = int(np.count_nonzero(mask))

    def is_left_out(self, key: Key) -> bool:
        """Whether the request with that key is marked as left out of S. Raises KeyError if there is none."""
        return bool(self._left_out[self._index(key)])

    def _index(self, key: Key) -> int:
        i = bisect_left(self.keys, key)
        if i == len(self.keys) or self.keys[i] != key:
            raise KeyError(key)
        return i

    # These return copies: an array that numpy has a view of cannot grow.

    def times(self) -> Array:
        """The first part of each key: deadlines, or arrivals."""
        return np.array(self._times)

    def seconds(self) -> Array:
        """The second part of each key: arrivals, or deadlines."""
        return np.array(self._seconds)

    def seqs(self) -> Seqs:
        """The third part of each key: sequence numbers, which identify the requests."""
        return np.array(self._seqs)

    def classes(self) -> Classes:
        return np.array(self._classes, np.int64)

    def costs(self, rates: Array) -> Array:
        """Seconds of prefill of each request; `rates` are seconds per token by class."""
        return np.array(self._tokens) * rates[self.classes()]

    def costs_in_s(self, rates: Array, until: float) -> float:
        """Seconds of prefill of all requests in S whose deadlines are at most `until`."""
        wanted = (np.array(self._left_out) == 0) & (np.array(self._times) <= until)
        return float(self.costs(rates)[wanted].sum())
