"""A stretch of the addresses of a KV range: the books of its extents. Pure.

The range has one for each kind of KV of its model. Indices are counted from the stretch's own beginning."""

from __future__ import annotations

from collections.abc import Sequence

from balloond.driver.kv.address_map import AddressMap
from balloond.driver.kv.growth import RangeGrowth
from balloond.driver.kv.reclaims import OpenReclaims
from balloond.driver.kv.reserve import Reserve
from balloond.driver.kv.watermarks import Watermarks


class Stretch:
    """The extents of one stretch: those mapped, those in the engine's hands, those in reserve, and those requested."""

    def __init__(
        self, first: int, count: int, large: int, low: int, high: int, reclaims: OpenReclaims, refused_pause_s: float
    ) -> None:
        """`count` indices, of which the first is index `first` of the range. `large`: indices in a large extent; `low`
        and `high`: the marks of its reserve; `reclaims`: those of the range."""
        self.first = first
        self.addresses = AddressMap(count, large)
        self.owned: set[int] = set()
        """Indices that are in the engine's hands."""
        self.reserve = Reserve(self.addresses)
        self.growth = RangeGrowth(self.addresses, self.reserve, Watermarks(low, high), reclaims, refused_pause_s)

    def __repr__(self) -> str:
        addresses = self.addresses
        mapped = f"{addresses.mapped} mapped of {addresses.n_indices} from {self.first} on"
        return f"Stretch(owned {len(self.owned)} + reserve {len(self.reserve)}, {mapped})"

    @property
    def mapped(self) -> int:
        """Number of indices that are mapped."""
        return self.addresses.mapped

    @property
    def spare(self) -> int:
        """Number of indices of the reserve that can go back because another stretch wants their memory: nothing that
        the engine comes for, or is offered."""
        return self._beside(self.growth.claimed) if self.growth.use != "offered" else 0

    @property
    def unclaimed(self) -> int:
        """Number of indices of the reserve that can leave and that the engine does not want."""
        return self._beside(self.growth.wanted)

    def _beside(self, kept: int) -> int:
        """Number of indices of the reserve that can leave while `kept` of it stay."""
        return max(0, min(self.reserve.whole, len(self.reserve) - kept))

    def check(self, quarantined: Sequence[int]) -> None:
        """Raises AssertionError when an index is missing or counted twice. `quarantined`: indices that were released
        and are not in the reserve yet."""
        addresses, here = self.addresses, set(self.reserve)
        addresses.check([*self.owned, *self.reserve, *quarantined])
        tied = [i for i in here if not here.issuperset(addresses.indices_of([addresses.first_of(i)]))]
        assert len(tied) == self.reserve.tied, "what cannot leave"
