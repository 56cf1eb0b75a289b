"""The KV addresses of one engine. Extents come and go, addresses stay.

Two threads use them. The engine's takes extents and gives them back: `acquire` from the reserve costs microseconds,
`release` never waits. The lease's own keeps the reserve between its marks, unmaps and returns what is not needed, and
answers limits and reclaims as far as the reserve goes, whatever the engine is doing. What goes beyond it is up to the
engine: `wake_fd` becomes readable, then `overage_bytes` and `take_reclaims` say how much.

The engine counts in indices, each `extent_bytes` of addresses. Where much is missing at once it comes in large extents
of several indices, because the cost of mapping is per extent; `extents` says which. A large one leaves whole, so what
comes back of it stays in the reserve until the rest does (balloond/driver/reserve.py).

Conservation: owned (in the engine's hands) + reserve + quarantined (released, but the device may not be done with it)
= mapped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from balloond.backends.base import Fence, Mapper
from balloond.driver.lease import KV, Done, Granted, GrowRefused, Lease
from balloond.driver.reports import Reports
from balloond.driver.reserve import Reserve
from balloond.driver.watermarks import IDLE_S, Watermarks
from balloond.policy.extents import LARGE

_FENCE_LOOK_S = 0.002
"""Seconds between two looks at fences that are not open; there are none while all are open."""
_REFUSED_PAUSE_S = 0.1
"""Seconds after a refusal before the reserve is requested again."""
_UNMAPPED_TOGETHER = 32
"""Number of extents that are unmapped together: balloond can give the first ones to others while the next are
unmapped."""
_ASKED_TOGETHER = 32
_LARGE_TOGETHER = 8
_UNANSWERED = 4
"""Most extents of a request, small or large, and most requests at a time: while some are mapped the next are made, few
descriptors are on their way at once, and others are served in between."""
_BULK = 4
"""Number of large extents missing at once from which growth requests large ones: a prompt of a few thousand tokens
should not hold them."""
_CLOSE_S = 30.0


@dataclass
class _Reclaim:
    """A reclaim that the reserve did not cover."""

    id: int
    remaining: int
    returned: int
    taken: bool = False
    """Whether the engine knows of it."""
    done: bool = False
    """Whether the engine did what it could."""


class ElasticRange:
    """The KV addresses of one engine, as the module describes them. `low` and `high` are the marks of the reserve, in
    extents. The engine calls the methods from one thread; those of the lease's thread begin with an underscore."""

    def __init__(
        self,
        lease: Lease,
        mapper: Mapper,
        *,
        span_bytes: int,
        extent_bytes: int,
        low: int,
        high: int,
        large: int = LARGE,
        poison: bool = False,
    ) -> None:
        """Reserves the addresses; the reserve is filled in the background. `large`: indices in a large extent; 1: there
        are none. `poison`: memory that is new or was released is filled with NaN."""
        if extent_bytes <= 0 or extent_bytes % mapper.page_bytes:
            raise ValueError(f"extents of {extent_bytes} bytes are not whole pages of {mapper.page_bytes}")
        self.extent_bytes = extent_bytes
        self.n_extents = span_bytes // extent_bytes
        self.address = mapper.reserve(self.n_extents * extent_bytes)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.woken = False
        """Whether `wake_fd` is readable, for an engine that looks between two steps."""
        self.cached_bytes = 0
        """Bytes of prefixes that the engine could evict now, as it said last: for its reserve others' prefixes are
        taken only where they are older."""
        self._lease = lease
        self._mapper = mapper
        self._poison = poison
        self._marks = Watermarks(low, high)
        self._changed = threading.Condition()
        """Condition whose lock guards everything below."""
        self._ids: dict[int, int] = {}
        """Extent id of everything mapped, by first index."""
        self._mapped = 0
        """Number of indices that are mapped."""
        self._owned: set[int] = set()
        self._reserve = Reserve(max(1, large))
        self._quarantine: list[tuple[Fence, list[int]]] = []
        self._unmapping = 0
        """Number of indices that have left the reserve and count as mapped until they are unmapped."""
        self._is_free = np.ones(self.n_extents, dtype=bool)
        """Whether nothing is mapped at an index."""
        self.extents = np.arange(self.n_extents)
        """First index of the extent that an index is in. The engine may read it for indices that it owns."""
        self._wanting = 0
        """Indices that the engine requested and did not get; what came for it meanwhile is in the reserve, and stays
        there."""
        self._missing = 0
        """Number of `_wanting` that have not come."""
        self._asked = 0
        """Number of `_missing` that are requested of balloond and not answered."""
        self._unanswered = 0
        """Number of requests that those are in."""
        self._bulk = False
        """Whether large extents are requested."""
        self._refused = False
        """Whether the last such request was refused."""
        self._instead = 0
        """Bytes of prefixes that the engine could evict instead of what is missing."""
        self._filling = False
        """Whether a request for the reserve is under way."""
        self._fill_small = False
        """Whether no large extent was left for the reserve."""
        self._fill_after = 0.0
        self._may_fill = True
        self._waiting = False
        """Whether the engine's thread is in `acquire` or `offer`."""
        self._offered = False
        """Whether the reserve is on offer: nothing of it goes back."""
        self._misplaced = 0
        """Number of extents of the reserve that go back, because their memory is wanted at lower addresses."""
        self._reclaims: list[_Reclaim] = []
        self._reports = Reports(lease, self._measure)
        self._idle_watch = False
        self._fence_watch = False
        self._closed = False
        self._callbacks_before = lease.on_limit, lease.on_reclaim, lease.on_attached
        lease.on_limit = self._on_limit
        lease.on_reclaim = self._on_reclaim
        lease.on_attached = self._on_attached
        lease.loop.call(self._tend)

    def __repr__(self) -> str:
        with self._changed:
            return (
                f"ElasticRange(owned {len(self._owned)} + reserve {len(self._reserve)}"
                f" + quarantined {self._quarantined}"
                f" = {self._mapped} mapped of {self.n_extents} x {self.extent_bytes} bytes)"
            )

    # --- the engine's side

    @property
    def mapped_bytes(self) -> int:
        return self._mapped * self.extent_bytes

    @property
    def refused(self) -> bool:
        """Whether balloond had nothing for the last request; False until it has answered."""
        return self._refused

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]:
        """Takes up to `count` indices of mapped extents, which are the caller's then. What the reserve lacks is
        requested of balloond and waited for at most `timeout_s`; what comes later goes into the reserve and makes
        `wake_fd` readable. `instead_bytes`: bytes of its own prefixes that the engine could evict instead."""
        now = time.monotonic()
        with self._changed:
            self._may_fill = True
            taken = self._take(count)
            self._marks.took(count, now)
            self._wanting = count - len(taken)
            self._missing = min(self._wanting, self._allowed_more())
            self._instead = instead_bytes
            if not taken and not self._missing:
                return []  # the lease's thread could do nothing, so it is not woken
            if self._missing > 0:
                self._refused = False
                self._bulk = 1 < self._reserve.factor <= self._missing // _BULK
                self._lease.loop.call(self._tend)
                taken += self._wait(now + timeout_s)
            elif self._marks.missing(len(self._reserve), now) and not self._filling and now >= self._fill_after:
                self._lease.loop.call(self._tend)
            self._reports.soon()
            return taken

    def _wait(self, until: float) -> list[int]:
        taken: list[int] = []
        self._waiting = True
        while (self._missing or self._asked) and not self._refused and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)
            more = self._take(self._wanting)
            self._wanting -= len(more)
            taken += more
            if not self._wanting:
                break
        self._waiting = False
        if self._refused:
            self._wanting = 0
        return taken

    def _take(self, count: int) -> list[int]:
        taken = self._reserve.take(min(count, self._usable()))
        self._owned.update(taken)
        return taken

    def _usable(self) -> int:
        """Number of indices of the reserve that may be taken. What is beyond the limit is on its way out: taken back,
        it would have to be emptied again."""
        below = max(0, -self._over()) // self.extent_bytes
        return min(len(self._reserve), self._reserve.tied + below)

    def take_tied(self) -> list[int]:
        """Takes the indices in the reserve that belong to large extents of which the engine has the rest: they leave
        with that, and count as the engine's as long as that stays."""
        with self._changed:
            taken = self._reserve.take(self._reserve.tied)
            self._owned.update(taken)
            return taken

    def offer(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]:
        """Returns the reserve's indices, for an engine of several ranks, which takes what all of them have. Before
        that, what is missing of `count`, and of the lowest addresses, is requested of balloond as in `acquire`, but
        never in large extents: not all ranks might get them. Nothing of the reserve goes back before `take`, which has
        to follow."""
        now = time.monotonic()
        with self._changed:
            self._may_fill = True
            self._marks.took(count, now)
            holes = self._holes(count)
            self._wanting = max(0, count - len(self._reserve), holes)
            self._missing = min(self._wanting, self._allowed_more())
            self._instead = instead_bytes
            if self._missing > 0:
                self._refused = self._bulk = False
                self._lease.loop.call(self._tend)
                self._waiting = True
                until = now + timeout_s
                while (self._missing or self._asked) and not self._refused and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                self._waiting = False
            # What lies higher than on other ranks is of no use: its memory is to come again, lower.
            if self._refused or not self._missing:
                self._misplaced = min(self._holes(count), len(self._reserve))
            self._offered = True
            return sorted(self._reserve)

    def _holes(self, count: int) -> int:
        """Number of the lowest `count` addresses that are not the engine's at which nothing is mapped."""
        unmapped = self._free(count)
        mapped = [*self._reserve, *(index for _, indices in self._quarantine for index in indices)]
        return len(set(unmapped) & set(sorted([*unmapped, *mapped])[:count]))

    def take(self, indices: Sequence[int]) -> None:
        """Ends an offer: `indices` of it are the caller's now."""
        taken = set(indices)
        with self._changed:
            self._offered = False
            self._reserve.remove(taken)
            self._owned |= taken
            self._wanting = max(0, self._wanting - len(taken))
            self._lease.loop.call(self._tend)
            self._reports.soon()

    def release(self, indices: Sequence[int]) -> None:
        """Gives up indices that the caller has emptied. They come back into the reserve, or are unmapped and returned,
        once work that was given to the device before is done. Raises ValueError for one that is not the caller's; then
        nothing has changed."""
        indices = list(indices)
        if not indices:
            return
        fence = self._mapper.fence()
        done = fence.done()
        with self._changed:
            if not self._owned.issuperset(indices) or len(set(indices)) < len(indices):
                raise ValueError(f"extents {sorted(set(indices) - self._owned) or indices} are not owned")
            self._owned.difference_update(indices)
            if done:
                self._to_reserve(indices)
            else:
                self._quarantine.append((fence, indices))
            above_low = len(self._reserve) > self._marks.low
            if not done or any(self._to_give(time.monotonic())) or (above_low and not self._idle_watch):
                self._lease.loop.call(self._tend)
            self._reports.soon()

    def located(self, indices: Iterable[int]) -> list[tuple[int, int]]:
        """(id of the extent, byte in the extent) of each index; all of them must be mapped."""
        with self._changed:
            firsts = [(index, int(self.extents[index])) for index in indices]
            return [(self._ids[first], (index - first) * self.extent_bytes) for index, first in firsts]

    def headroom(self) -> int:
        """Number of further extents that the limit and the addresses allow; the device may still refuse them."""
        with self._changed:
            return self._allowed_more() + self._usable()

    def _allowed_more(self) -> int:
        """Number of indices that may be mapped beyond those that are."""
        by_limit = self._lease.limit.bytes // self.extent_bytes - self._mapped
        return max(0, min(by_limit, self.n_extents - self._mapped))

    def overage_bytes(self) -> int:
        """Bytes that must be given up, beside the reserve and what leaves already, to meet the limit."""
        if self._over() <= 0:
            return 0  # called several times a step, so the lock is taken only where a glance without it says so
        with self._changed:
            return max(0, self._over())

    @property
    def _quarantined(self) -> int:
        """Number of indices in quarantine. May be read without the lock, as a glance: there is hardly ever one."""
        return sum(len(indices) for _, indices in self._quarantine)

    def _over(self) -> int:
        kept = self._mapped - self._reserve.whole - self._quarantined - self._unmapping
        return kept * self.extent_bytes - self._lease.limit.bytes

    def take_reclaims(self) -> int:
        """Bytes reclaimed since the last call that the reserve did not cover; clears `wake_fd`. The engine evicts
        prefixes, releases the extents that this emptied, and calls `reclaimed`."""
        with self._changed:
            if self.woken:
                self.woken = False
                os.eventfd_read(self.wake_fd)
            wanted = 0
            for reclaim in self._reclaims:
                if not reclaim.taken:
                    reclaim.taken = True
                    wanted += reclaim.remaining
            return wanted

    def reclaimed(self) -> None:
        """Marks the reclaims that the engine took as done: it did what it could."""
        with self._changed:
            for reclaim in self._reclaims:
                reclaim.done = reclaim.done or reclaim.taken
        self._lease.loop.call(self._tend)

    def usage(self, used_bytes: int, cached: Iterable[tuple[float, int]]) -> None:
        """Passes to balloond's policy the bytes of running requests, and (seconds since last use, bytes) of prefixes
        that no request runs on. Cheap; reported at most every 100 ms."""
        self._reports.usage(used_bytes, cached)

    def empty(self, timeout_s: float = _CLOSE_S) -> None:
        """Unmaps and returns everything for hibernation, and waits until that is done; addresses and lease stay.
        Nothing is mapped again before the next `acquire`. Raises ValueError while extents are owned, TimeoutError when
        a fence does not open in `timeout_s`."""
        with self._changed:
            if self._owned:
                raise ValueError(f"{len(self._owned)} extents are still in use")
            self._may_fill = False
            self._missing = self._wanting = 0
            for reclaim in self._reclaims:
                reclaim.done = True  # the engine could not do more
            self._reports.usage(0, ())
            self._lease.loop.call(self._tend)
            if not self._changed.wait_for(lambda: not self._ids, timeout_s):
                raise TimeoutError(f"{len(self._ids)} extents are still mapped after {timeout_s:g} s")

    def lower(self, timeout_s: float) -> None:
        """Returns the reserve to balloond, so that what is acquired next has the lowest addresses. Waits until that is
        done, or for `timeout_s`."""
        with self._changed:
            self._may_fill = False
            self._missing = self._wanting = 0
            self._lease.loop.call(self._tend)
            self._changed.wait_for(lambda: self._mapped <= len(self._owned) + self._reserve.tied, timeout_s)

    def close(self) -> None:
        """Unmaps and returns everything, owned extents included, and gives the addresses up."""
        finished = threading.Event()

        def end() -> None:
            with self._changed:
                if not self._closed:
                    self._closed = True
                    ids = list(self._ids.values())
                    self._ids.clear()
                    self._mapped = 0
                    self._mapper.release(self.address, self.n_extents * self.extent_bytes)
                    self._lease.give_back(ids)
                    for reclaim in self._reclaims:
                        self._reports.send(reclaim.id, reclaim.returned)
                    lease = self._lease
                    lease.on_limit, lease.on_reclaim, lease.on_attached = self._callbacks_before
                    os.close(self.wake_fd)
            finished.set()

        self._lease.loop.call(end)
        finished.wait(_CLOSE_S)

    def check(self) -> None:
        """Raises AssertionError when an extent is missing or counted twice. The check runs between two callbacks of the
        lease's thread: in the middle of one, what it unmaps is nowhere."""
        found: Future[None] = Future()

        def look() -> None:
            try:
                self._check()
                found.set_result(None)
            except AssertionError as error:
                found.set_exception(error)

        self._lease.loop.call(look)
        found.result(_CLOSE_S)

    def _check(self) -> None:
        with self._changed:
            quarantined = [index for _, indices in self._quarantine for index in indices]
            parts = [*self._owned, *self._reserve, *quarantined]
            assert self._unmapping == 0, "between two callbacks nothing is being unmapped"
            mapped = [index for first in self._ids for index in self._indices_of(first)]
            assert sorted(parts) == sorted(mapped), "owned + reserve + quarantined = mapped"
            assert len(mapped) == self._mapped and self._reserve.large <= self._ids.keys()
            assert np.flatnonzero(~self._is_free).tolist() == sorted(mapped), "every address is accounted for"
            expected = np.arange(self.n_extents)
            for first in self._reserve.large:
                expected[self._indices_of(first)] = first
            assert np.array_equal(self.extents, expected), "the extent of each index"
            here = set(self._reserve)
            tied = [i for i in here if not here.issuperset(self._indices_of(self._reserve.extent_of(i)))]
            assert len(tied) == self._reserve.tied, "what cannot leave"

    # --- the lease's thread

    def _on_limit(self) -> None:
        with self._changed:
            # An `acquire` must not wait for growth that is not requested any more.
            self._missing = min(self._missing, max(self._asked, self._allowed_more()))
            self._changed.notify_all()
        self._tend(answer=True)
        self._wake()

    def _on_attached(self) -> None:
        with self._changed:
            self._fill_after = 0.0
        self._tend(answer=True)

    def _on_reclaim(self, reclaim_id: int, nbytes: int, deep: bool) -> None:
        with self._changed:
            self._fill_after = time.monotonic() + _REFUSED_PAUSE_S
            reclaim = _Reclaim(reclaim_id, nbytes, 0, taken=not deep, done=not deep)
            self._reclaims.append(reclaim)
        self._tend()
        if deep and not reclaim.done:
            self._wake()

    def _wake(self) -> None:
        with self._changed:
            if not self._closed:
                self.woken = True
                os.eventfd_write(self.wake_fd, 1)

    def _tend(self, answer: bool = False) -> None:
        """Does everything there is to do, in the order of urgency: fences, giving back, requesting."""
        with self._changed:
            if self._closed:
                return
            now = time.monotonic()
            self._look_at_fences()
            leaving = self._leaving(now)
        firsts = sorted({self._reserve.extent_of(index) for index in leaving}, reverse=True)
        for start in range(0, len(firsts), _UNMAPPED_TOGETHER):
            self._return(firsts[start : start + _UNMAPPED_TOGETHER])
        self._answer_reclaims(len(leaving), force=answer)
        self._ask(now)
        self._watch_idle(now)

    def _return(self, firsts: Sequence[int]) -> None:
        """Unmaps and gives back extents that left the reserve; nothing else touches them."""
        indices = [index for first in firsts for index in self._indices_of(first)]
        for first, count in _runs(indices):
            self._mapper.unmap(self.address + first * self.extent_bytes, count * self.extent_bytes)
        self._lease.give_back([self._ids[first] for first in firsts])
        with self._changed:
            for first in firsts:
                del self._ids[first]
            self._reserve.large.difference_update(firsts)
            self._mapped -= len(indices)
            self._unmapping -= len(indices)
            self.extents[indices] = indices
            self._is_free[indices] = True
            self._changed.notify_all()

    def _indices_of(self, first: int) -> range:
        """Indices of the mapped extent that begins at `first`."""
        return range(first, first + (self._reserve.factor if first in self._reserve.large else 1))

    def _look_at_fences(self) -> None:
        still = []
        for fence, indices in self._quarantine:
            if fence.done():
                self._to_reserve(indices)
            else:
                still.append((fence, indices))
        if len(still) < len(self._quarantine):
            self._changed.notify_all()
        self._quarantine = still
        if still and not self._fence_watch:
            self._fence_watch = True
            self._lease.loop.later(_FENCE_LOOK_S, self._fences_due)

    def _fences_due(self) -> None:
        self._fence_watch = False
        self._tend()

    def _to_reserve(self, indices: Sequence[int]) -> None:
        if self._poison:
            for index in indices:
                self._mapper.poison(self.address + index * self.extent_bytes, self.extent_bytes)
        self._reserve.put(indices)

    def _to_give(self, now: float) -> tuple[int, int, int]:
        """Number of indices that have to leave the reserve: (for the limit, for reclaims, because they are not
        needed)."""
        whole = self._reserve.whole
        if self._offered or not whole:
            return 0, 0, 0
        if not self._may_fill:
            return whole, 0, 0
        limit = self._lease.limit.bytes // self.extent_bytes
        at_once, later = (
            sum(-(-reclaim.remaining // self.extent_bytes) for reclaim in self._reclaims if reclaim.done == done)
            for done in (True, False)
        )
        # A running engine keeps what its next steps need while it still looks for prefixes.
        kept = self._marks.low if self._reports.running else 0
        reclaimed = at_once + min(later, max(0, whole - at_once - kept))
        surplus = max(self._marks.surplus(len(self._reserve) - self._wanting, now), self._misplaced)
        return max(0, self._mapped - limit), reclaimed, surplus

    def _leaving(self, now: float) -> list[int]:
        """Takes the indices that have to go out of the reserve. Where no small extent is left, a large one leaves for a
        few of its indices; for a reclaim only if the floor holds."""
        over, reclaimed, surplus = self._to_give(now)
        leaving = self._reserve.leave(over, more=True) if over else []
        if reclaimed > len(leaving):
            spare = self._mapped - len(leaving) - self._lease.limit.floor_bytes // self.extent_bytes
            wanted = reclaimed - len(leaving)
            leaving += self._reserve.leave(wanted, more=spare >= wanted + self._reserve.factor - 1)
        if surplus > len(leaving):
            leaving += self._reserve.leave(surplus - len(leaving), more=False)
        if not leaving:
            return []
        self._misplaced = 0
        self._unmapping += len(leaving)
        nbytes = len(leaving) * self.extent_bytes
        for reclaim in self._reclaims:
            part = min(nbytes, -(-reclaim.remaining // self.extent_bytes) * self.extent_bytes)
            reclaim.returned += part
            reclaim.remaining = max(0, reclaim.remaining - part)
            nbytes -= part
        return leaving

    def _answer_reclaims(self, left: int, force: bool) -> None:
        """Reports every reclaim that is over: it is met, or the engine did what it could and no fence holds more."""
        with self._changed:
            over = [r for r in self._reclaims if not r.remaining or (r.done and not self._quarantine)]
            self._reclaims = [r for r in self._reclaims if r not in over]
            for reclaim in over:
                reclaim.done = True
        for reclaim in over:
            self._reports.send(reclaim.id, reclaim.returned)
        if not over and force:
            self._reports.send()
        elif not over and left:
            self._reports.soon()

    # --- requests

    def _ask(self, now: float) -> None:
        wanted: list[tuple[int, int, int]] = []
        of, fill, in_use = 1, 0, False
        with self._changed:
            instead = self._instead
            if self._closed:
                return
            while (left := self._to_ask()) > 0 and self._unanswered < _UNANSWERED:
                of, part = self._next_part(left)
                self._asked += part * of
                self._unanswered += 1
                wanted.append((of, part, left - part * of))
            idle = not (self._filling or self._asked or self._missing)
            if self._may_fill and idle and now >= self._fill_after:
                reserve = len(self._reserve) - self._wanting
                of, fill = self._next_fill(min(self._marks.missing(reserve, now), self._allowed_more()), reserve)
                # Where all memory is taken a decode step would wait for each extent, so others have to give back ahead
                # of it.
                in_use = self._reports.running and reserve < self._marks.low
                self._filling = fill > 0
        nbytes = self.extent_bytes
        for size, part, left in wanted:
            done = self._wanted_came(size, part)
            self._lease.request(
                KV, size * nbytes, part, done, min_count=1, behind_bytes=left * nbytes, cached_bytes=instead
            )
        if fill > 0:
            done = self._fill_came(of)
            # Large extents are taken only where they are free. A request that waited for them would keep what is free
            # from small ones, those that the engine requests itself among them.
            self._lease.request(
                KV,
                of * nbytes,
                fill,
                done,
                min_count=1,
                for_reserve=of > 1 or not in_use,
                cached_bytes=self.cached_bytes,
            )

    def _to_ask(self) -> int:
        """Number of indices that are missing and not requested."""
        return min(self._missing, self._allowed_more()) - self._asked

    def _next_part(self, left: int) -> tuple[int, int]:
        """(indices in an extent, number of such extents) of one more request for growth."""
        factor = self._reserve.factor
        large = min(left // factor, len(self._free_large()) - self._asked // factor) if self._bulk else 0
        return (factor, min(large, _LARGE_TOGETHER)) if large > 0 else (1, min(left, _ASKED_TOGETHER))

    def _next_fill(self, missing: int, reserve: int) -> tuple[int, int]:
        """(indices in an extent, number of such extents) of a request for the reserve. Only fast growth lets so much be
        missing that a large extent holds it: then the engine's thread would wait for the time that each extent takes of
        this process."""
        factor = self._reserve.factor
        if 1 < factor <= missing and not self._fill_small:
            most = min(self._marks.high - reserve, self._allowed_more())  # what is above the mark would go back
            large = min(-(-missing // factor), most // factor, len(self._free_large()))
            if large > 0:
                return factor, min(large, _LARGE_TOGETHER)
        self._fill_small = False
        return 1, min(missing, _ASKED_TOGETHER)

    def _wanted_came(self, of: int, asked: int) -> Done:
        def done(extents: list[Granted], refused: GrowRefused | None) -> None:
            self._map(extents)
            with self._changed:
                self._asked -= of * asked
                self._unanswered -= 1
                self._missing = max(0, self._missing - of * len(extents))
                self._refused = refused is not None and of == 1
                if self._refused:
                    self._missing = 0
                elif refused is not None:
                    self._bulk = False  # there may be enough for small ones
                late = bool(extents) and self._wanting > 0 and not self._waiting
                self._changed.notify_all()
            if late:
                self._wake()
            self._tend()

        return done

    def _fill_came(self, of: int) -> Done:
        def done(extents: list[Granted], refused: GrowRefused | None) -> None:
            self._map(extents)
            with self._changed:
                self._filling = False
                self._fill_small = refused is not None and of > 1  # there may be enough for small ones
                if refused is not None and of == 1:
                    self._fill_after = time.monotonic() + _REFUSED_PAUSE_S
                self._changed.notify_all()
            self._tend()

        return done

    def _map(self, extents: list[Granted]) -> None:
        """Maps extents of one size at the lowest free addresses; those for which there are none go back."""
        of = extents[0].bytes // self.extent_bytes if extents else 1
        with self._changed:
            # Only this thread maps, so the addresses stay free.
            firsts = self._free_large() if of > 1 else self._free(len(extents))
        placed = [] if self._closed else list(zip(firsts, extents, strict=False))
        for first, extent in placed:
            address = self.address + first * self.extent_bytes
            self._mapper.map(address, extent.fd, extent.bytes)
            os.close(extent.fd)
            if self._poison:
                self._mapper.poison(address, extent.bytes)
        if superfluous := extents[len(placed) :]:
            for extent in superfluous:
                os.close(extent.fd)
            self._lease.give_back([extent.id for extent in superfluous])
        with self._changed:
            for first, extent in reversed(placed):
                self._ids[first] = extent.id
                self._is_free[first : first + of] = False
                self.extents[first : first + of] = first
                self._mapped += of
                if of > 1:
                    self._reserve.large.add(first)
                self._reserve.put(range(first, first + of))
            self._reports.soon()

    def _free(self, count: int) -> list[int]:
        """The lowest `count` indices at which nothing is mapped."""
        found: list[int] = np.flatnonzero(self._is_free)[:count].tolist()
        return found

    def _free_large(self) -> list[int]:
        """First indices at which large extents fit, the lowest first."""
        factor = self._reserve.factor
        groups = self._is_free[: self.n_extents // factor * factor].reshape(-1, factor)
        found: list[int] = (np.flatnonzero(groups.all(axis=1)) * factor).tolist()
        return found

    # --- time

    def _watch_idle(self, now: float) -> None:
        """Sets a timer for when growth has been away for long enough to shrink to the low mark. Without a surplus there
        is none."""
        with self._changed:
            above_low = len(self._reserve) > self._marks.low or self._wanting
            if self._idle_watch or self._closed or not above_low or self._marks.idle(now):
                return
            self._idle_watch = True
        self._lease.loop.later(IDLE_S, self._idle_due)

    def _idle_due(self) -> None:
        self._idle_watch = False
        with self._changed:
            if not self._waiting and self._marks.idle(time.monotonic()):
                self._wanting = 0  # the engine did not come for it
                self._reports.soon()
        self._tend()

    def _measure(self) -> tuple[int, int]:
        with self._changed:
            reserve = min(self._reserve.whole, len(self._reserve) - self._wanting)
            return self.mapped_bytes, max(0, reserve) * self.extent_bytes


def _runs(indices: Iterable[int]) -> Iterable[tuple[int, int]]:
    """(first, count) of each run of neighbouring indices."""
    first = count = 0
    for index in sorted(indices):
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = index, 1
    if count:
        yield first, count
