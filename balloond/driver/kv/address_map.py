"""Extents that are mapped in a range, by index. Pure.

A range counts its addresses in indices, all of one size. An extent covers one index, or, if it is large, `factor`
indices in a row from a multiple of `factor`; it is named by its first index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class AddressMap:
    """The extent at each of `n_indices` indices, or none. `factor`: indices in a large extent; 1: there are none."""

    def __init__(self, n_indices: int, factor: int = 1) -> None:
        self.n_indices = n_indices
        self.factor = factor
        self.ids: dict[int, int] = {}
        """Id of each mapped extent, by its first index."""
        self.large: set[int] = set()
        """First indices of the large extents that are mapped."""
        self.mapped = 0
        """Number of indices that are mapped."""
        self.first_indices = np.arange(n_indices)
        """First index of the extent that an index is in; the index itself where nothing is mapped."""
        self._is_free = np.ones(n_indices, dtype=bool)
        """Whether nothing is mapped at an index."""

    def first_of(self, index: int) -> int:
        """First index of the extent that has this index."""
        first = index - index % self.factor
        return first if first in self.large else index

    def indices_of(self, firsts: Sequence[int]) -> list[int]:
        """Indices of the mapped extents that begin at `firsts`."""
        if not self.large:
            return list(firsts)
        return [i for first in firsts for i in range(first, first + (self.factor if first in self.large else 1))]

    def headroom(self, limit: int) -> int:
        """Number of indices that may be mapped beyond those that are, if at most `limit` may be in all."""
        return max(0, min(limit, self.n_indices) - self.mapped)

    def free(self, count: int) -> list[int]:
        """The lowest `count` indices at which nothing is mapped."""
        found: list[int] = np.flatnonzero(self._is_free)[:count].tolist()
        return found

    def free_large(self) -> list[int]:
        """First indices at which large extents fit, the lowest first."""
        groups = self._is_free[: self.n_indices // self.factor * self.factor].reshape(-1, self.factor)
        found: list[int] = (np.flatnonzero(groups.all(axis=1)) * self.factor).tolist()
        return found

    def add(self, first: int, id: int, size: int) -> None:
        """Notes that an extent of `size` indices, 1 or `factor`, is mapped from the free index `first` on."""
        self.ids[first] = id
        self.mapped += size
        if size == 1:
            self._is_free[first] = False
            return
        self._is_free[first : first + size] = False
        self.first_indices[first : first + size] = first
        self.large.add(first)

    def remove(self, firsts: Sequence[int]) -> None:
        """Notes that the extents that begin at `firsts` are mapped no more."""
        indices = self.indices_of(firsts)
        for first in firsts:
            del self.ids[first]
        self.large.difference_update(firsts)
        self.mapped -= len(indices)
        self.first_indices[indices] = indices
        self._is_free[indices] = True

    def check(self, mapped: Iterable[int]) -> None:
        """Raises AssertionError unless the indices in `mapped`, each once, are those that are mapped."""
        here = sorted(self.indices_of(list(self.ids)))
        assert sorted(mapped) == here, "every mapped index is somewhere, once"
        assert len(here) == self.mapped and self.large <= self.ids.keys()
        assert np.flatnonzero(~self._is_free).tolist() == here, "every address is accounted for"
        expected = np.arange(self.n_indices)
        for first in self.large:
            expected[self.indices_of([first])] = first
        assert np.array_equal(self.first_indices, expected), "the extent of each index"
