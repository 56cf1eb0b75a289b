"""What is worth keeping while there is room for it. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class BoundedCache(Generic[K, V]):
    """Values by their keys, of so many bytes together. What was not asked for the longest leaves first; the last one
    stays, however large."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._values: dict[K, tuple[V, int]] = {}
        """The next to leave first."""
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: K, value: V, nbytes: int) -> None:
        """In place of what was kept by that key."""
        self._remove(key)
        self._values[key] = (value, nbytes)
        self.nbytes += nbytes
        while self.nbytes > self._most_bytes and len(self._values) > 1:
            self._remove(next(iter(self._values)))

    def get(self, key: K) -> V | None:
        found = self._values.pop(key, None)
        if found is None:
            return None
        self._values[key] = found
        return found[0]

    def clear(self) -> None:
        self._values.clear()
        self.nbytes = 0

    def _remove(self, key: K) -> None:
        found = self._values.pop(key, None)
        if found is not None:
            self.nbytes -= found[1]
