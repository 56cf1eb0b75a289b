"""The KV range of one rank of several. The same extents are in use on all ranks, so that each scheduler, for itself,
finds room for the same requests: growth is prepared by every rank on its device and happens where all have it, and
limits and reclaims are those of the rank with the least memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gpu_scheduler.engines.sglang.policy.agreement import RankFacts, common

if TYPE_CHECKING:
    from gpu_scheduler.engines.sglang.memory.ranges import OfferingRange
    from gpu_scheduler.engines.sglang.ranks.ranks import Ranks


class SharedRange:
    """A `ranges.KvRange` over this rank's own. Its answers are the same on all ranks, except for `mapped_bytes`, which
    decides nothing."""

    def __init__(self, own: OfferingRange, ranks: Ranks, limit: Callable[[], int]) -> None:
        """`own`: this rank's range; `limit`: this rank's limit in bytes. All ranks must make theirs together."""
        self._own = own
        self._ranks = ranks
        self._limit = limit
        """Limit in bytes of this rank alone."""
        self.address = own.address
        self.extent_bytes = own.extent_bytes
        self.wake_fd = own.wake_fd
        self._first_limit = min(ranks.gather(limit()))
        """Limit in bytes until the ranks agree on one in their first step."""
        self._in_use = 0
        """Number of extents in use in all stretches."""
        self._refused: dict[int, bool] = {}
        """Whether balloond had no memory for the last request of one of the ranks, by the number of the stretch."""

    def facts(self) -> RankFacts:
        """This rank's news for the next step. A reclaim in it counts as taken."""
        news = self._own.woken
        return RankFacts(news, self._own.take_reclaims() if news else 0, self._limit())

    @property
    def limit_bytes(self) -> int:
        """Bytes of KV that every rank may hold."""
        agreed = self._ranks.agreed.limit
        return self._first_limit if agreed is None else agreed

    @property
    def mapped_bytes(self) -> int:
        return self._own.mapped_bytes

    @property
    def woken(self) -> bool:
        return self._ranks.agreed.news

    @property
    def cached_bytes(self) -> int:
        return self._own.cached_bytes

    @cached_bytes.setter
    def cached_bytes(self, nbytes: int) -> None:
        self._own.cached_bytes = nbytes

    def extents(self, stretch: int = 0) -> NDArray[np.int64]:
        return self._own.extents(stretch)

    def offset_bytes(self, stretch: int) -> int:
        return self._own.offset_bytes(stretch)

    def refused(self, stretch: int = 0) -> bool:
        return self._refused.get(stretch, False)

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0, stretch: int = 0) -> list[int]:
        """Takes at most `count` extents that all ranks can have, and returns their indices. What one rank has beyond
        those stays in its reserve."""
        self._refused[stretch] = False
        count = min(count, self.headroom(stretch))
        if count <= 0:
            return []
        offer = self._own.offer(count, timeout_s=timeout_s, instead_bytes=instead_bytes, stretch=stretch)
        offers = self._ranks.gather((offer, self._own.refused(stretch)))
        self._refused[stretch] = any(refused for _, refused in offers)
        taken = common([offer for offer, _ in offers], count)
        self._own.take(taken, stretch=stretch)
        self._in_use += len(taken)
        return taken

    def take_tied(self, stretch: int = 0) -> list[int]:
        """Returns nothing: with several ranks there are no large extents."""
        return []

    def release(self, indices: Sequence[int], *, stretch: int = 0) -> None:
        self._own.release(indices, stretch=stretch)
        self._in_use -= len(indices)

    def located(self, indices: Iterable[int], *, stretch: int = 0) -> list[tuple[int, int]]:
        return self._own.located(indices, stretch=stretch)

    def headroom(self, stretch: int = 0) -> int:
        return max(0, self.limit_bytes // self.extent_bytes - self._in_use)

    def overage_bytes(self) -> int:
        return max(0, self._in_use * self.extent_bytes - self.limit_bytes)

    def take_reclaims(self) -> int:
        return self._ranks.agreed.wanted

    def reclaimed(self) -> None:
        self._own.reclaimed()

    def usage(self, used_bytes: int, cached: Sequence[tuple[float, int]]) -> None:
        self._own.usage(used_bytes, cached)

    def empty(self) -> None:
        self._own.empty()
        self._in_use = 0

    def lower(self, timeout_s: float) -> None:
        self._own.lower(timeout_s)

    def close(self) -> None:
        self._own.close()
