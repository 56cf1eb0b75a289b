"""The KV addresses of one engine. Extents come and go, addresses stay.

Two threads use them. The engine's takes extents and gives them back: `acquire` from the reserve costs microseconds,
`release` never waits. The lease's own keeps the reserve between its marks, unmaps and returns what is not needed, and
answers limits and reclaims as far as the reserve goes, whatever the engine is doing. What goes beyond it is up to the
engine: `wake_fd` becomes readable, then `overage_bytes` and `take_reclaims` say how much.

The engine counts in indices, each `extent_bytes` of addresses. Where much is missing at once it comes in large extents
of several indices, because the cost of mapping is per extent; `extents` says which. A large one leaves as a whole:
indices of it that come back stay in the reserve until all have come back (`reserve.py`). What is requested when, and
what goes back, is decided in `growth.py`.

Conservation: owned (in the engine's hands) + reserve + quarantined (released, but the device may not be done with it)
= mapped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

from balloond.backends.base import Fence, Mapper
from balloond.driver.connection.lease import KV, Granted, GrowRefused, Lease
from balloond.driver.kv.address_map import AddressMap
from balloond.driver.kv.growth import ExtentRequest, RangeGrowth
from balloond.driver.kv.reclaims import OpenReclaims
from balloond.driver.kv.reports import Reports
from balloond.driver.kv.reserve import Reserve
from balloond.driver.kv.watermarks import IDLE_S, Watermarks
from balloond.policy.extents import LARGE

_FENCE_LOOK_S = 0.002
"""Seconds between two looks at fences that are not open; there are none while all are open."""
_REFUSED_PAUSE_S = 0.1
"""Seconds after a refusal before the reserve is requested again."""
_UNMAPPED_TOGETHER = 32
"""Number of extents that are unmapped together: balloond can give the first ones to others while the next are
unmapped."""
_CLOSE_S = 30.0


class ElasticRange:
    """The KV addresses of one engine, as the module describes them. `low` and `high` are the marks of the reserve, in
    extents. The engine calls the methods from one thread; the lease's thread those that `__init__` gives it."""

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
        refused_pause_s: float = _REFUSED_PAUSE_S,
    ) -> None:
        """Reserves the addresses; the reserve is filled in the background. `large`: indices in a large extent; 1: there
        are none. `poison`: memory that is new or was released is filled with NaN."""
        if extent_bytes <= 0 or extent_bytes % mapper.page_bytes:
            raise ValueError(f"extents of {extent_bytes} bytes are not whole pages of {mapper.page_bytes}")
        self.extent_bytes = extent_bytes
        self.n_extents = span_bytes // extent_bytes
        addresses = self._addresses = AddressMap(self.n_extents, max(1, large))
        self.extents = addresses.first_indices
        """First index of the extent that an index is in. The engine may read it for indices that it owns."""
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
        self._changed = threading.Condition()
        """Condition whose lock guards everything below, and `_addresses`."""
        self._ids = addresses.ids
        """Extent id of everything mapped, by first index."""
        self._owned: set[int] = set()
        self._reserve = Reserve(addresses)
        self._quarantine: list[tuple[Fence, list[int]]] = []
        self._unmapping = 0
        """Number of indices that have left the reserve and count as mapped until they are unmapped."""
        self._reclaims = OpenReclaims(extent_bytes)
        marks = Watermarks(low, high)
        self._growth = RangeGrowth(addresses, self._reserve, marks, self._reclaims, refused_pause_s)
        self._waiting = False
        """Whether the engine's thread waits in `acquire` or `offer`."""
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
                f" = {self._addresses.mapped} mapped of {self.n_extents} x {self.extent_bytes} bytes)"
            )

    # --- the engine's side

    @property
    def mapped_bytes(self) -> int:
        return self._addresses.mapped * self.extent_bytes

    @property
    def refused(self) -> bool:
        """Whether balloond had nothing for the last request; False until it has answered."""
        return self._growth.demand == "refused"

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0) -> list[int]:
        """Takes up to `count` indices of mapped extents, which are the caller's then. What the reserve lacks is
        requested of balloond and waited for at most `timeout_s`; what comes later goes into the reserve and makes
        `wake_fd` readable. `instead_bytes`: bytes of its own prefixes that the engine could evict instead."""
        now = time.monotonic()
        with self._changed:
            growth = self._growth
            taken = self._take(count)
            wanted = count - len(taken)
            headroom = self._addresses.headroom(self._limit) if wanted else 0
            missing = growth.want(count, wanted, headroom, now, instead_bytes=instead_bytes)
            if not taken and not missing:
                return []  # the lease's thread could do nothing, so it is not woken
            if missing > 0:
                self._lease.loop.call(self._tend)
                until = now + timeout_s
                while growth.wanted and self._wait(until):
                    more = self._take(growth.wanted)
                    growth.got(len(more))
                    taken += more
                growth.no_longer_awaited()
            elif growth.fill_is_due(now):
                self._lease.loop.call(self._tend)
            self._reports.soon()
            return taken

    def _wait(self, until: float) -> bool:
        """Waits until something may have come for the engine. Returns False, at once, if nothing will or it is too
        late."""
        if not self._growth.awaited or (left := until - time.monotonic()) <= 0:
            return False
        self._waiting = True
        self._changed.wait(left)
        self._waiting = False
        return True

    @property
    def _missing(self) -> int:
        """Number of indices that the engine wants and that have not come."""
        return self._growth.missing

    @property
    def _limit(self) -> int:
        """Number of indices that may be mapped."""
        return self._lease.limit.bytes // self.extent_bytes

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
        """Takes the indices in the reserve that belong to large extents of which the engine has the rest: the large
        extent leaves as a whole, so until then all of it counts as the engine's."""
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
            growth = self._growth
            wanted = max(0, count - len(self._reserve), self._holes(count))
            headroom = self._addresses.headroom(self._limit)
            growth.want(count, wanted, headroom, now, instead_bytes=instead_bytes, only_small=True)
            if self._missing > 0:
                self._lease.loop.call(self._tend)
                until = now + timeout_s
                while self._wait(until):
                    pass
            growth.offer(self._holes(count))
            return sorted(self._reserve)

    def _holes(self, count: int) -> int:
        """Number of the lowest `count` addresses that are not the engine's at which nothing is mapped."""
        unmapped = self._addresses.free(count)
        mapped = [*self._reserve, *(index for _, indices in self._quarantine for index in indices)]
        return len(set(unmapped) & set(sorted([*unmapped, *mapped])[:count]))

    def take(self, indices: Sequence[int]) -> None:
        """Ends an offer: `indices` of it are the caller's now."""
        taken = set(indices)
        with self._changed:
            self._growth.end_offer()
            self._reserve.remove(taken)
            self._owned |= taken
            self._growth.got(len(taken))
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
            if not done or self._has_surplus() or (self._growth.above_low and not self._idle_watch):
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
            return self._addresses.headroom(self._limit) + self._usable()

    def overage_bytes(self) -> int:
        """Bytes that must be given up, beside the reserve and what leaves already, to meet the limit."""
        if self._over() <= 0:
            return 0  # called several times a step, so the lock is taken only where a glance without it says so
        with self._changed:
            return max(0, self._over())

    @property
    def _quarantined(self) -> int:
        """Number of indices in quarantine. May be read without the lock, as a glance: there is hardly ever one."""
        return sum(len(indices) for _, indices in self._quarantine) if self._quarantine else 0

    def _over(self) -> int:
        kept = self._addresses.mapped - self._reserve.whole - self._quarantined - self._unmapping
        return kept * self.extent_bytes - self._lease.limit.bytes

    def take_reclaims(self) -> int:
        """Bytes reclaimed since the last call that the reserve did not cover; clears `wake_fd`. The engine evicts
        prefixes, releases the extents that this emptied, and calls `reclaimed`."""
        with self._changed:
            if self.woken:
                self.woken = False
                os.eventfd_read(self.wake_fd)
            return self._reclaims.take()

    def reclaimed(self) -> None:
        """Marks the reclaims that the engine took as done: it did what it could."""
        with self._changed:
            self._reclaims.done()
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
            self._growth.empty()
            self._reclaims.done(every=True)  # the engine could not do more
            self._reports.usage(0, ())
            self._lease.loop.call(self._tend)
            if not self._changed.wait_for(lambda: not self._ids, timeout_s):
                raise TimeoutError(f"{len(self._ids)} extents are still mapped after {timeout_s:g} s")

    def lower(self, timeout_s: float) -> None:
        """Returns the reserve to balloond, so that what is acquired next has the lowest addresses. Waits until that is
        done, or for `timeout_s`."""
        with self._changed:
            self._growth.empty()
            self._lease.loop.call(self._tend)
            self._changed.wait_for(lambda: self._addresses.mapped <= len(self._owned) + self._reserve.tied, timeout_s)

    def close(self) -> None:
        """Unmaps and returns everything, owned extents included, and gives the addresses up."""
        finished = threading.Event()

        def end() -> None:
            with self._changed:
                if not self._closed:
                    self._closed = True
                    ids = list(self._ids.values())
                    self._addresses.remove(list(self._ids))
                    self._mapper.release(self.address, self.n_extents * self.extent_bytes)
                    self._lease.give_back(ids)
                    for reclaim in self._reclaims.pop_all():
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
            self._addresses.check(parts)
            addresses, here = self._addresses, set(self._reserve)
            tied = [i for i in here if not here.issuperset(addresses.indices_of([addresses.first_of(i)]))]
            assert len(tied) == self._reserve.tied, "what cannot leave"

    # --- the lease's thread

    def _on_limit(self) -> None:
        with self._changed:
            # An `acquire` must not wait for growth that is not requested any more.
            self._growth.limited(self._limit)
            self._changed.notify_all()
        self._tend(answer=True)
        self._wake()

    def _on_attached(self) -> None:
        with self._changed:
            self._growth.end_pause()
        self._tend(answer=True)

    def _on_reclaim(self, reclaim_id: int, nbytes: int, deep: bool) -> None:
        with self._changed:
            self._growth.pause(time.monotonic())
            reclaim = self._reclaims.add(reclaim_id, nbytes, deep)
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
            floor = self._lease.limit.floor_bytes // self.extent_bytes
            leaving = self._growth.leave(now, self._limit, floor, self._reports.running)
            self._unmapping += len(leaving)
        firsts = sorted({self._addresses.first_of(index) for index in leaving}, reverse=True)
        for start in range(0, len(firsts), _UNMAPPED_TOGETHER):
            self._return(firsts[start : start + _UNMAPPED_TOGETHER])
        self._answer_reclaims(len(leaving), force=answer)
        self._ask(now)
        self._watch_idle(now)

    def _return(self, firsts: Sequence[int]) -> None:
        """Unmaps and gives back extents that left the reserve; nothing else touches them."""
        indices = self._addresses.indices_of(firsts)
        for first, count in _runs(indices):
            self._mapper.unmap(self.address + first * self.extent_bytes, count * self.extent_bytes)
        self._lease.give_back([self._ids[first] for first in firsts])
        with self._changed:
            self._addresses.remove(firsts)
            self._unmapping -= len(indices)
            self._changed.notify_all()

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

    def _has_surplus(self) -> bool:
        """Whether part of the reserve has to leave."""
        return any(self._growth.surplus(time.monotonic(), self._limit, self._reports.running))

    def _answer_reclaims(self, left: int, force: bool) -> None:
        """Reports every reclaim that is over: it is met, or the engine did what it could and no fence holds more."""
        with self._changed:
            over = self._reclaims.pop_over(more_to_come=bool(self._quarantine))
        for reclaim in over:
            self._reports.send(reclaim.id, reclaim.returned)
        if not over and force:
            self._reports.send()
        elif not over and left:
            self._reports.soon()

    # --- requests

    def _ask(self, now: float) -> None:
        with self._changed:
            if self._closed:
                return
            requests = self._growth.requests(now, self._limit, self._reports.running)
            instead_bytes = self._growth.instead_bytes
        for request in requests:
            self._lease.request(
                KV,
                request.size * self.extent_bytes,
                request.count,
                partial(self._answered, request),
                min_count=1,
                only_free=request.only_free,
                behind_bytes=request.behind * self.extent_bytes,
                cached_bytes=self.cached_bytes if request.is_fill else instead_bytes,
            )

    def _answered(self, request: ExtentRequest, extents: list[Granted], refused: GrowRefused | None) -> None:
        self._map(extents)
        with self._changed:
            self._growth.answered(request, len(extents), refused is not None, time.monotonic())
            late = bool(extents) and not request.is_fill and self._growth.wanted > 0 and not self._waiting
            self._changed.notify_all()
        if late:
            self._wake()
        self._tend()

    def _map(self, extents: list[Granted]) -> None:
        """Maps extents of one size at the lowest free addresses; those for which there are none go back."""
        of = extents[0].bytes // self.extent_bytes if extents else 1
        with self._changed:
            # Only this thread maps, so the addresses stay free.
            firsts = self._addresses.free_large() if of > 1 else self._addresses.free(len(extents))
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
                self._addresses.add(first, extent.id, of)
                self._reserve.put(range(first, first + of))
            self._reports.soon()

    # --- time

    def _watch_idle(self, now: float) -> None:
        """Sets a timer for when growth has been away for long enough to shrink to the low mark. Without a surplus there
        is none."""
        with self._changed:
            above_low = self._growth.above_low or self._growth.wanted
            if self._idle_watch or self._closed or not above_low or self._growth.idle(now):
                return
            self._idle_watch = True
        self._lease.loop.later(IDLE_S, self._idle_due)

    def _idle_due(self) -> None:
        self._idle_watch = False
        with self._changed:
            if not self._waiting and self._growth.idle(time.monotonic()):
                self._growth.forget_wanted()
                self._reports.soon()
        self._tend()

    def _measure(self) -> tuple[int, int]:
        with self._changed:
            reserve = min(self._reserve.whole, len(self._reserve) - self._growth.wanted)
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
