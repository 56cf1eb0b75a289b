"""The KV addresses of one engine. Extents come and go, addresses stay.

Two threads use them. The engine's takes extents and gives them back: `acquire` from the reserve costs microseconds,
`release` never waits. The lease's own keeps the reserve between its marks, unmaps and returns what is not needed, and
answers limits and reclaims as far as the reserve goes, whatever the engine is doing. Memory that exceeds the reserve is
for the engine to give up: `wake_fd` becomes readable, then `overage_bytes` and `take_reclaims` say how much.

The engine counts in indices, each `extent_bytes` of addresses. Where much is missing at once it comes in large extents
of several indices, because the cost of mapping is per extent; `extents` says which. A large one leaves as a whole:
indices of it that come back stay in the reserve until all have come back (`reserve.py`). `growth.py` decides when
memory is requested, and which indices go back.

If a model has KV of several kinds, each kind has a stretch of the addresses, with indices, reserve and growth of its
own. Limit, reclaims and reports are those of the whole range. An extent stays in the stretch in which it was mapped, so
memory that one stretch wants and another has in reserve leaves the reserve first.

Conservation, in each stretch: owned (in the engine's hands) + reserve + quarantined (released, but the device may not
be done with it) = mapped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from balloond.backends.base import Fence, Mapper
from balloond.driver.connection.lease import KV, Granted, GrowRefused, Lease
from balloond.driver.kv.growth import ExtentRequest
from balloond.driver.kv.reclaims import OpenReclaims
from balloond.driver.kv.reports import Reports
from balloond.driver.kv.stretch import Stretch
from balloond.driver.kv.watermarks import IDLE_S
from balloond.policy.extents import LARGE

_FENCE_LOOK_S = 0.002
"""Seconds between two looks at fences that are not open; there are none while all are open."""
_REFUSED_PAUSE_S = 0.1
"""Seconds after a refusal in which nothing is requested for the reserve, and nothing that is not urgent."""
_UNMAPPED_TOGETHER = 32
"""Number of extents that are unmapped together: balloond can give the first ones to others while the next are
unmapped."""
_CLOSE_S = 30.0


class ElasticRange:
    """The KV addresses of one engine, as the module describes them. `low` and `high` are the marks of the reserve, in
    extents. The engine calls the methods from one thread; the lease's thread those that `__init__` gives it. `stretch`:
    the number of the stretch that indices belong to; each counts its own from 0."""

    def __init__(
        self,
        lease: Lease,
        mapper: Mapper,
        *,
        span_bytes: int | Sequence[int],
        extent_bytes: int,
        low: int,
        high: int,
        large: int = LARGE,
        poison: bool = False,
        refused_pause_s: float = _REFUSED_PAUSE_S,
    ) -> None:
        """Reserves the addresses; the reserve is filled in the background. `span_bytes`: bytes of addresses; several:
        those of each stretch, which share the marks. `large`: indices in a large extent; 1: there are none. `poison`:
        memory that is new or was released is filled with NaN."""
        if extent_bytes <= 0 or extent_bytes % mapper.page_bytes:
            raise ValueError(f"extents of {extent_bytes} bytes are not whole pages of {mapper.page_bytes}")
        self.extent_bytes = extent_bytes
        spans = [span_bytes] if isinstance(span_bytes, int) else span_bytes
        counts = [span // extent_bytes for span in spans]
        self._reclaims = OpenReclaims(extent_bytes)
        marks = -(-low // len(counts)), -(-high // len(counts))
        self._stretches: list[Stretch] = []
        first = 0
        for count in counts:
            self._stretches.append(Stretch(first, count, max(1, large), *marks, self._reclaims, refused_pause_s))
            # A large extent lies at a multiple of its size, so a stretch begins at one too.
            first += -(-count // max(1, large)) * max(1, large)
        self.n_extents = self._stretches[-1].first + counts[-1]
        """Number of indices from the first stretch's beginning to the last one's end."""
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
        """Condition whose lock guards everything below, and the stretches."""
        self._quarantine: list[tuple[Fence, Stretch, list[int]]] = []
        self._unmapping = 0
        """Number of indices that have left the reserve and count as mapped until they are unmapped."""
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
            parts = ", ".join(repr(stretch) for stretch in self._stretches)
            return f"ElasticRange({parts}, quarantined {self._quarantine}, extents of {self.extent_bytes} bytes)"

    # --- the engine's side

    @property
    def mapped_bytes(self) -> int:
        return self._mapped * self.extent_bytes

    @property
    def _mapped(self) -> int:
        """Number of indices mapped in all stretches."""
        return sum(stretch.mapped for stretch in self._stretches)

    def extents(self, stretch: int = 0) -> NDArray[np.int64]:
        """First index of the extent that an index is in, for each index of a stretch. The engine may read it for
        indices that it owns."""
        return self._stretches[stretch].addresses.first_indices

    def offset_bytes(self, stretch: int) -> int:
        """Bytes from `address` to a stretch."""
        return self._stretches[stretch].first * self.extent_bytes

    def refused(self, stretch: int = 0) -> bool:
        """Whether balloond had nothing for the last request for a stretch; False until it has answered."""
        return self._stretches[stretch].growth.demand == "refused"

    def acquire(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0, stretch: int = 0) -> list[int]:
        """Takes up to `count` indices of mapped extents, which are the caller's then. What the reserve lacks is
        requested of balloond and waited for at most `timeout_s`; what comes later goes into the reserve and makes
        `wake_fd` readable. `instead_bytes`: bytes of its own prefixes that the engine could evict instead. Where these
        suffice and the call does not wait, nothing is requested for 0.1 s after a refusal, unless another stretch has
        memory to spare: a request and its answer keep the engine's thread from running for 0.1 ms, and balloond hears
        every 0.1 s how old prefixes are."""
        now = time.monotonic()
        with self._changed:
            of = self._stretches[stretch]
            growth = of.growth
            taken = self._take(of, count)
            wanted = count - len(taken)
            headroom = of.addresses.headroom(self._room(of)) if wanted else 0
            spare = any(other.spare for other in self._stretches if other is not of)
            urgent = timeout_s > 0 or spare or instead_bytes < wanted * self.extent_bytes
            missing = growth.want(count, wanted, headroom, now, instead_bytes=instead_bytes, urgent=urgent)
            if not taken and not missing:
                return []  # the lease's thread could do nothing, so it is not woken
            if missing > 0:
                self._lease.loop.call(self._tend)
                until = now + timeout_s
                while growth.wanted and self._wait(of, until):
                    more = self._take(of, growth.wanted)
                    growth.got(len(more))
                    taken += more
                growth.no_longer_awaited()
            elif growth.fill_is_due(now):
                self._lease.loop.call(self._tend)
            self._reports.soon()
            return taken

    def _wait(self, stretch: Stretch, until: float) -> bool:
        """Waits until something may have come for the engine. Returns False, at once, if nothing will or it is too
        late."""
        if not stretch.growth.awaited or (left := until - time.monotonic()) <= 0:
            return False
        self._waiting = True
        self._changed.wait(left)
        self._waiting = False
        return True

    @property
    def _limit(self) -> int:
        """Number of indices that may be mapped in all stretches."""
        return self._lease.limit.bytes // self.extent_bytes

    def _left_to(self, stretch: Stretch, total: int) -> int:
        """Number of indices left to a stretch of a `total`, beside what the others have mapped."""
        return total - (self._mapped - stretch.mapped)

    def _room(self, stretch: Stretch) -> int:
        """Number of indices that may be mapped in a stretch once the others have made way for it, and what is on its
        way out has left."""
        others = sum(other.spare for other in self._stretches if other is not stretch)
        return self._left_to(stretch, self._limit) + others + self._unmapping

    def _make_way(self, stretch: Stretch, refused: int = 0) -> int:
        """Has indices in the reserves of other stretches go back, as many as `stretch` misses beyond the limit, or as
        balloond has `refused` it, if that is more. Returns how many go back."""
        over = stretch.growth.missing - stretch.addresses.headroom(self._left_to(stretch, self._limit))
        wanted = max(over, refused)
        made = 0
        for other in self._stretches:
            if other is not stretch and wanted > made and other.spare:
                made += other.growth.make_way(min(wanted - made, other.spare), time.monotonic())
        return made

    def _take(self, stretch: Stretch, count: int) -> list[int]:
        taken = stretch.reserve.take(min(count, self._usable(stretch)))
        stretch.owned.update(taken)
        return taken

    def _usable(self, stretch: Stretch) -> int:
        """Number of indices of the reserve that may be taken. What is beyond the limit is on its way out: taken back,
        it would have to be emptied again."""
        below = max(0, -self._over()) // self.extent_bytes
        return min(len(stretch.reserve), stretch.reserve.tied + below)

    def take_tied(self, stretch: int = 0) -> list[int]:
        """Takes the indices in the reserve that belong to large extents of which the engine has the rest: the large
        extent leaves as a whole, so until then all of it counts as the engine's."""
        with self._changed:
            of = self._stretches[stretch]
            taken = of.reserve.take(of.reserve.tied)
            of.owned.update(taken)
            return taken

    def offer(self, count: int, *, timeout_s: float = 0.0, instead_bytes: int = 0, stretch: int = 0) -> list[int]:
        """Returns the reserve's indices, for an engine of several ranks, which takes what all of them have. Before
        that, what is missing of `count`, and of the lowest addresses, is requested of balloond as in `acquire`, but
        never in large extents: not all ranks might get them. Nothing of the stretch's reserve goes back before `take`,
        which has to follow."""
        now = time.monotonic()
        with self._changed:
            of = self._stretches[stretch]
            wanted = max(0, count - len(of.reserve), self._holes(of, count))
            headroom = of.addresses.headroom(self._room(of))
            of.growth.want(count, wanted, headroom, now, instead_bytes=instead_bytes, only_small=True)
            if of.growth.missing > 0:
                self._lease.loop.call(self._tend)
                until = now + timeout_s
                while self._wait(of, until):
                    pass
            of.growth.offer(self._holes(of, count))
            return sorted(of.reserve)

    def _holes(self, stretch: Stretch, count: int) -> int:
        """Number of the lowest `count` addresses that are not the engine's at which nothing is mapped."""
        unmapped = stretch.addresses.free(count)
        mapped = [*stretch.reserve, *self._quarantined_in(stretch)]
        return len(set(unmapped) & set(sorted([*unmapped, *mapped])[:count]))

    def _quarantined_in(self, stretch: Stretch) -> list[int]:
        """Indices of a stretch that are in quarantine."""
        return [index for _, of, indices in self._quarantine if of is stretch for index in indices]

    def take(self, indices: Sequence[int], *, stretch: int = 0) -> None:
        """Ends an offer: `indices` of it are the caller's now."""
        taken = set(indices)
        with self._changed:
            of = self._stretches[stretch]
            of.growth.end_offer(len(taken))
            of.reserve.remove(taken)
            of.owned |= taken
            self._lease.loop.call(self._tend)
            self._reports.soon()

    def release(self, indices: Sequence[int], *, stretch: int = 0) -> None:
        """Gives up indices that the caller has emptied. They come back into the reserve, or are unmapped and returned,
        once work that was given to the device before is done. Raises ValueError for one that is not the caller's; then
        nothing has changed."""
        indices = list(indices)
        if not indices:
            return
        fence = self._mapper.fence()
        done = fence.done()
        with self._changed:
            of = self._stretches[stretch]
            if not of.owned.issuperset(indices) or len(set(indices)) < len(indices):
                raise ValueError(f"extents {sorted(set(indices) - of.owned) or indices} are not owned")
            of.owned.difference_update(indices)
            if done:
                self._to_reserve(of, indices)
            else:
                self._quarantine.append((fence, of, indices))
            if not done or self._has_surplus() or (of.growth.above_low and not self._idle_watch):
                self._lease.loop.call(self._tend)
            self._reports.soon()

    def located(self, indices: Iterable[int], *, stretch: int = 0) -> list[tuple[int, int]]:
        """(id of the extent, byte in the extent) of each index; all of them must be mapped."""
        with self._changed:
            addresses = self._stretches[stretch].addresses
            firsts = [(index, int(addresses.first_indices[index])) for index in indices]
            return [(addresses.ids[first], (index - first) * self.extent_bytes) for index, first in firsts]

    def headroom(self, stretch: int = 0) -> int:
        """Number of further extents that the limit and the addresses allow; the device may still refuse them."""
        with self._changed:
            of = self._stretches[stretch]
            return of.addresses.headroom(self._room(of)) + self._usable(of)

    def overage_bytes(self) -> int:
        """Bytes that must be given up, beside the reserve and what leaves already, to meet the limit."""
        if self._over() <= 0:
            return 0  # called several times a step, so the lock is taken only where a glance without it says so
        with self._changed:
            return max(0, self._over())

    @property
    def _quarantined(self) -> int:
        """Number of indices in quarantine. May be read without the lock, as a glance: there is hardly ever one."""
        return sum(len(indices) for *_, indices in self._quarantine) if self._quarantine else 0

    def _over(self) -> int:
        kept = sum(stretch.mapped - stretch.reserve.whole for stretch in self._stretches)
        return (kept - self._quarantined - self._unmapping) * self.extent_bytes - self._lease.limit.bytes

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
            if owned := sum(len(stretch.owned) for stretch in self._stretches):
                raise ValueError(f"{owned} extents are still in use")
            self._empty_reserves()
            self._reclaims.done(every=True)  # the engine could not do more
            self._reports.usage(0, ())
            self._lease.loop.call(self._tend)
            if not self._changed.wait_for(lambda: not self._mapped, timeout_s):
                raise TimeoutError(f"{self._mapped} extents are still mapped after {timeout_s:g} s")

    def lower(self, timeout_s: float) -> None:
        """Returns the reserve to balloond, so that what is acquired next has the lowest addresses. Waits until that is
        done, or for `timeout_s`."""
        with self._changed:
            self._empty_reserves()
            self._lease.loop.call(self._tend)
            self._changed.wait_for(self._has_only_owned, timeout_s)

    def _empty_reserves(self) -> None:
        for stretch in self._stretches:
            stretch.growth.empty()

    def _has_only_owned(self) -> bool:
        """Whether no more is mapped than what the engine has and what is tied to it."""
        return all(each.mapped <= len(each.owned) + each.reserve.tied for each in self._stretches)

    def close(self) -> None:
        """Unmaps and returns everything, owned extents included, and gives the addresses up."""
        finished = threading.Event()

        def end() -> None:
            with self._changed:
                if not self._closed:
                    self._closed = True
                    ids = [id for stretch in self._stretches for id in stretch.addresses.ids.values()]
                    for stretch in self._stretches:
                        stretch.addresses.remove(list(stretch.addresses.ids))
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
            assert self._unmapping == 0, "between two callbacks nothing is being unmapped"
            for stretch in self._stretches:
                stretch.check(self._quarantined_in(stretch))

    # --- the lease's thread

    def _on_limit(self) -> None:
        with self._changed:
            # An `acquire` must not wait for growth that is not requested any more.
            for stretch in self._stretches:
                stretch.growth.limited(self._room(stretch))
            self._changed.notify_all()
        self._tend(answer=True)
        self._wake()

    def _on_attached(self) -> None:
        with self._changed:
            for stretch in self._stretches:
                stretch.growth.end_pause()
        self._tend(answer=True)

    def _on_reclaim(self, reclaim_id: int, nbytes: int, deep: bool) -> None:
        with self._changed:
            for stretch in self._stretches:
                stretch.growth.pause(time.monotonic())
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
            for stretch in self._stretches:
                self._make_way(stretch)
            floor = self._lease.limit.floor_bytes // self.extent_bytes
            leaving = [(stretch, self._leave(stretch, now, floor)) for stretch in self._stretches]
        for stretch, indices in leaving:
            firsts = sorted({stretch.addresses.first_of(index) for index in indices}, reverse=True)
            for start in range(0, len(firsts), _UNMAPPED_TOGETHER):
                self._return(stretch, firsts[start : start + _UNMAPPED_TOGETHER])
        self._answer_reclaims(sum(len(indices) for _, indices in leaving), force=answer)
        self._ask(now)
        self._watch_idle(now)

    def _leave(self, stretch: Stretch, now: float, floor: int) -> list[int]:
        """Takes the indices that have to go out of the reserve of one stretch; until they are unmapped they count as
        mapped there."""
        # Indices that leave the stretches before this one count for the limit and the reclaims too.
        left, floor = (self._left_to(stretch, total) + self._unmapping for total in (self._limit, floor))
        leaving = stretch.growth.leave(now, left, floor, self._reports.running)
        self._unmapping += len(leaving)
        return leaving

    def _return(self, stretch: Stretch, firsts: Sequence[int]) -> None:
        """Unmaps and gives back extents that left the reserve; nothing else touches them."""
        indices = stretch.addresses.indices_of(firsts)
        for first, count in _runs(indices):
            self._mapper.unmap(self._address_of(stretch, first), count * self.extent_bytes)
        self._lease.give_back([stretch.addresses.ids[first] for first in firsts])
        with self._changed:
            stretch.addresses.remove(firsts)
            self._unmapping -= len(indices)
            self._changed.notify_all()

    def _address_of(self, stretch: Stretch, index: int) -> int:
        return self.address + (stretch.first + index) * self.extent_bytes

    def _look_at_fences(self) -> None:
        still = []
        for fence, stretch, indices in self._quarantine:
            if fence.done():
                self._to_reserve(stretch, indices)
            else:
                still.append((fence, stretch, indices))
        if len(still) < len(self._quarantine):
            self._changed.notify_all()
        self._quarantine = still
        if still and not self._fence_watch:
            self._fence_watch = True
            self._lease.loop.later(_FENCE_LOOK_S, self._fences_due)

    def _fences_due(self) -> None:
        self._fence_watch = False
        self._tend()

    def _to_reserve(self, stretch: Stretch, indices: Sequence[int]) -> None:
        if self._poison:
            for index in indices:
                self._mapper.poison(self._address_of(stretch, index), self.extent_bytes)
        stretch.reserve.put(indices)

    def _has_surplus(self) -> bool:
        """Whether part of a reserve has to leave."""
        now, running = time.monotonic(), self._reports.running
        return any(
            any(stretch.growth.surplus(now, self._left_to(stretch, self._limit), running))
            for stretch in self._stretches
        )

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
            requests = self._due(now)
        for stretch, request in requests:
            self._lease.request(
                KV,
                request.size * self.extent_bytes,
                request.count,
                partial(self._answered, stretch, request),
                min_count=1,
                only_free=request.only_free,
                behind_bytes=request.behind * self.extent_bytes,
                cached_bytes=self.cached_bytes if request.is_fill else stretch.growth.instead_bytes,
            )

    def _due(self, now: float) -> list[tuple[Stretch, ExtentRequest]]:
        """Requests to make now. Requests for which the engine waits come first; no reserve is filled while another
        stretch misses indices."""
        found = []
        for stretch in sorted(self._stretches, key=lambda each: not each.growth.misses):
            may_fill = not any(other.growth.misses for other in self._stretches if other is not stretch)
            # Indices that are requested for other stretches, and have not come, are theirs.
            left = self._left_to(stretch, self._limit) - sum(
                other.growth.under_way for other in self._stretches if other is not stretch
            )
            requests = stretch.growth.requests(now, left, self._reports.running, may_fill=may_fill)
            found += [(stretch, request) for request in requests]
        return found

    def _answered(
        self, stretch: Stretch, request: ExtentRequest, extents: list[Granted], refused: GrowRefused | None
    ) -> None:
        self._map(stretch, extents)
        with self._changed:
            growth, is_refused = stretch.growth, refused is not None
            if is_refused and not request.is_fill and request.size == 1:
                # Reserves of other stretches go back first; then balloond has something for this request.
                is_refused = not self._make_way(stretch, request.count - len(extents))
            growth.answered(request, len(extents), is_refused, time.monotonic())
            late = bool(extents) and not request.is_fill and growth.wanted > 0 and not self._waiting
            self._changed.notify_all()
        if late:
            self._wake()
        self._tend()

    def _map(self, stretch: Stretch, extents: list[Granted]) -> None:
        """Maps extents of one size at the lowest free addresses of a stretch; those for which there are none go
        back."""
        of = extents[0].bytes // self.extent_bytes if extents else 1
        with self._changed:
            # Only this thread maps, so the addresses stay free.
            firsts = stretch.addresses.free_large() if of > 1 else stretch.addresses.free(len(extents))
        placed = [] if self._closed else list(zip(firsts, extents, strict=False))
        for first, extent in placed:
            address = self._address_of(stretch, first)
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
                stretch.addresses.add(first, extent.id, of)
                stretch.reserve.put(range(first, first + of))
            self._reports.soon()

    # --- time

    def _watch_idle(self, now: float) -> None:
        """Sets a timer for when growth has been away for long enough to shrink to the low mark. Without a surplus there
        is none."""
        with self._changed:
            growths = [stretch.growth for stretch in self._stretches]
            idle = all(each.idle(now) or not (each.above_low or each.wanted) for each in growths)
            if self._idle_watch or self._closed or idle:
                return
            self._idle_watch = True
        self._lease.loop.later(IDLE_S, self._idle_due)

    def _idle_due(self) -> None:
        self._idle_watch = False
        with self._changed:
            for stretch in self._stretches:
                if not self._waiting and stretch.growth.idle(time.monotonic()):
                    stretch.growth.forget_wanted()
                    self._reports.soon()
        self._tend()

    def _measure(self) -> tuple[int, int]:
        with self._changed:
            reserve = sum(stretch.unclaimed for stretch in self._stretches)
            return self.mapped_bytes, reserve * self.extent_bytes


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
