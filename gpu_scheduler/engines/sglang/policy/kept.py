"""A cache bounded by bytes. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by key, with at most `most_bytes` together. The least recently used leaves first; the last one stays,
    however large."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: dict[K, tuple[V, int]] = {}
        """Value and bytes by key, least recently used first."""
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Adds a value of `nbytes`, replacing the one with that key, and evicts others as needed."""
        self._remove(key)
        self._values[key] = (value, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self._most_bytes and len(self._values) > 1:
            self._remove(next(iter(self._values)))

    def get(self, key: K) -> V | None:
        """The value with this key, which becomes the most recently used; None if it is not here."""
        found = self._values.pop(key, None)
        if found is None:
            return None
        self._values[key] = found
        return found[0]

    def clear(self) -> None:
        """Removes all values."""
        self._values.clear()
        self.nbytes = 0

    def _remove(self, key: K) -> None:
        found = self._values.pop(key, None)
        if found is not None:
            self.nbytes -= found[1]
