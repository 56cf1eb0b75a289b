"""A line of waiting requests by deadline, or by arrival, kept in parallel.

What a plan computes with are machine numbers: of 10,000 requests it touches no object, numpy sees the numbers without a
copy of each. An insertion moves at most n numbers or pointers in each list (a few microseconds at 10,000), a search is
a bisection.
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


class Line:
    """Requests by key."""

    __slots__ = ("_classes", "_seconds", "_times", "_tokens", "ids", "keys")

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.ids: list[str] = []
        self._times = array("d")
        self._seconds = array("d")
        self._tokens = array("d")
        self._classes = array("q")

    def __len__(self) -> int:
        return len(self.ids)

    def insert(self, key: Key, request_id: str, tokens: int, class_: int) -> None:
        """Add a request of `tokens` uncached tokens; `class_` indexes the rates that `costs` gets."""
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.ids.insert(i, request_id)
        self._times.insert(i, key[0])
        self._seconds.insert(i, key[1])
        self._tokens.insert(i, tokens)
        self._classes.insert(i, class_)

    def remove(self, key: Key) -> None:
        """Take out the request with that key; KeyError if there is none."""
        i = bisect_left(self.keys, key)
        if i == len(self.keys) or self.keys[i] != key:
            raise KeyError(key)
        del self.keys[i], self.ids[i], self._times[i], self._seconds[i], self._tokens[i], self._classes[i]

    def before(self, time: float) -> list[str]:
        """Those whose times are earlier."""
        return self.ids[: bisect_left(self._times, time)]

    # Copies: an array that somebody looks into cannot grow.

    def times(self) -> Array:
        """The first part of each key."""
        return np.array(self._times)

    def seconds(self) -> Array:
        """The second part of each key."""
        return np.array(self._seconds)

    def classes(self) -> Classes:
        return np.array(self._classes, np.int64)

    def costs(self, rates: Array) -> Array:
        """Seconds of prefill of each request; `rates` are seconds per token by class."""
        return np.array(self._tokens) * rates[self.classes()]
