"""Indices that are mapped in a range and not in the engine's hands. Pure.

A large extent (`address_map.py`) leaves whole: its indices in the reserve are `tied` while some of its
others are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from balloond.driver.kv.address_map import AddressMap


class Reserve:
    """The reserve of a range, in indices that are mapped in `addresses`. What enters it must be mapped before."""

    def __init__(self, addresses: AddressMap) -> None:
        self._factor = addresses.factor
        self._first_of = addresses.first_of
        self._large = addresses.large
        self.tied = 0
        """Number of indices that may be taken and cannot leave."""
        self._indices: list[int] = []
        """Indices in the reserve; those to be taken first are last, with the lowest addresses."""
        self._here: dict[int, int] = {}
        """Number of indices in the reserve, by the first index of their large extent."""

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    @property
    def whole(self) -> int:
        """Number of indices that can leave."""
        return len(self._indices) - self.tied

    def put(self, indices: Iterable[int]) -> None:
        indices = list(indices)
        self._indices += indices
        self._count(indices, 1)

    def remove(self, indices: Iterable[int]) -> None:
        """Takes out indices that are elsewhere now."""
        gone = set(indices)
        self._count([index for index in self._indices if index in gone], -1)
        self._indices = [index for index in self._indices if index not in gone]

    def take(self, count: int) -> list[int]:
        """Takes at most `count` indices, of each kind the lowest addresses first: tied ones, whole large extents where
        so much is taken, then small ones."""
        if count <= 0:
            return []
        if not self._here:
            # Two fills may lie in the list, the later one behind. It is nearly sorted, so this costs next to nothing.
            self._indices.sort(reverse=True)
            taken = self._indices[-count:]
            del self._indices[-count:]
            return taken
        tied, large, small = self._sorted()
        taken = tied[:count]
        in_large = (count - len(taken)) // self._factor * self._factor
        taken += large[:in_large]
        taken += (small + large[in_large:])[: count - len(taken)]
        self.remove(taken)
        return taken

    def leave(self, count: int, more: bool) -> list[int]:
        """Takes `count` indices out in whole extents, the highest addresses first, so that the lower ones fill. Indices
        that make no whole extent stay, or leave in a larger one (`more`)."""
        _, large, small = self._sorted()
        in_large = min(count // self._factor * self._factor, len(large))
        in_small = min(count - in_large, len(small))
        if more and in_large + in_small < min(count, self.whole):
            in_large += self._factor
        leaving = large[len(large) - in_large :] + small[len(small) - in_small :]
        self.remove(leaving)
        return leaving

    def _sorted(self) -> tuple[list[int], list[int], list[int]]:
        """(tied indices, those of whole large extents, those of small ones), each by address."""
        indices = sorted(self._indices)
        if not self._here:
            return [], [], indices
        first_of = self._first_of
        here = [self._here.get(first_of(index), 0) for index in indices]
        tied = [index for index, count in zip(indices, here, strict=True) if 0 < count < self._factor]
        large = [index for index, count in zip(indices, here, strict=True) if count == self._factor]
        return tied, large, [index for index, count in zip(indices, here, strict=True) if not count]

    def _count(self, indices: Iterable[int], change: int) -> None:
        if not self._large:
            return
        here, factor, first_of = self._here, self._factor, self._first_of
        for index in indices:
            first = first_of(index)
            if first in self._large:
                before = here.get(first, 0)
                after = before + change
                self.tied += after % factor - before % factor
                here[first] = after
                if not after:
                    del here[first]
