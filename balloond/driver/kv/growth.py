"""When a range requests extents of balloond, and which of its reserve it gives back. Pure: `now` in seconds, sizes in
indices.

Three things have a state:

    `Demand`, what is requested for the engine
        any         the engine misses `_BULK` large extents or more     large
        any         the engine misses less than that                    small
        any         balloond refuses large extents                      small
        any         balloond refuses small extents                      refused     nothing is missing any more
        refused     extents of an earlier request come                  small

    `Fill`, what is requested for the reserve
        ready, small_next   extents are requested                       under_way
        small_next          nothing is to be requested                  ready
        under_way           they come                                   ready
        under_way           balloond refuses large extents              small_next
        under_way           balloond refuses small extents              ready       after a pause

    `ReserveUse`, what becomes of the reserve
        emptied     the engine wants extents                            kept
        any         the reserve is offered                              offered
        offered     the offer ends                                      kept
        any         it is to be emptied                                 emptied
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from balloond.driver.kv.address_map import AddressMap
from balloond.driver.kv.reclaims import OpenReclaims
from balloond.driver.kv.reserve import Reserve
from balloond.driver.kv.watermarks import Watermarks

_TOGETHER = 32
"""Most small extents of one request. Requests are short so that some extents are mapped while the next are made, few
descriptors are on their way at once, and other leases are served in between."""
_LARGE_TOGETHER = 8
"""Most large extents of one request."""
_UNANSWERED = 4
"""Most requests that are not answered yet."""
_BULK = 4
"""Number of large extents missing at once from which growth requests large ones: a prompt of a few thousand tokens
should not hold them."""


Demand = Literal["small", "large", "refused"]
"""How extents that the engine misses are requested: small ones; large ones as far as they go, and small ones for the
rest; or none, as balloond had nothing for the last request."""
Fill = Literal["ready", "small_next", "under_way"]
"""How extents for the reserve are requested, one request at a time: large ones if so much is missing; small ones, as no
large one was left; or none, as a request is not answered yet."""
ReserveUse = Literal["kept", "offered", "emptied"]
"""State of the reserve. Kept: it is filled to its marks, and what is beyond them or the limit, or reclaimed,
goes back. Offered: it is filled, and nothing of it goes back, as the engine takes some of it next. Emptied: all of it
goes back, and nothing is requested for it."""


@dataclass(frozen=True, slots=True)
class ExtentRequest:
    """A request to balloond for `count` extents of `size` indices each."""

    size: int
    count: int
    behind: int = 0
    """Indices that will be requested after it."""
    is_fill: bool = False
    """True if the extents are for the reserve; False if the engine waits for them."""
    only_free: bool = False
    """Whether the extents come from free memory only, so that no other lease gives memory back for them."""


class RangeGrowth:
    """Growth and shrinking of one range. It reads `addresses` and `reserve`, and takes what leaves out of the reserve.
    Limits and floors are in indices; `running`: whether requests run on the engine, as far as it has reported."""

    def __init__(
        self,
        addresses: AddressMap,
        reserve: Reserve,
        marks: Watermarks,
        reclaims: OpenReclaims,
        refused_pause_s: float,
    ) -> None:
        """`refused_pause_s`: seconds after a refusal or a reclaim in which nothing is requested for the reserve, and
        seconds after a refusal in which nothing is requested that is not urgent (`want`)."""
        self._addresses = addresses
        self._reserve = reserve
        self._marks = marks
        self._reclaims = reclaims
        self._refused_pause_s = refused_pause_s
        self.demand: Demand = "small"
        self.wanted = 0
        """Indices that the engine requested and did not get; what came for it meanwhile is in the reserve, and stays
        there."""
        self.left = False
        """Whether the engine was offered what it wants and could not take all of it. The reserve keeps the rest for the
        engine's next offer, unless another stretch wants the memory."""
        self.missing = 0
        """Number of `wanted` that no request for them has brought."""
        self.requested = 0
        """Number of `missing` that are requested of balloond and not answered."""
        self._unanswered = 0
        """Number of requests that those are in."""
        self.instead_bytes = 0
        """Bytes of prefixes that the engine could evict instead of what is missing."""
        self.fill: Fill = "ready"
        self._filling = 0
        """Number of indices that are requested for the reserve and not answered."""
        self._fill_at = 0.0
        """Time from which the reserve may be requested."""
        self._again_at = 0.0
        """Time from which extents that are not urgent may be requested; before it, balloond has just refused some."""
        self.use: ReserveUse = "kept"
        self._misplaced = 0
        """Number of indices of the reserve that go back, because their memory is wanted at lower addresses."""
        self._making_way = 0
        """Number of indices of the reserve that go back, because another stretch wants their memory."""

    # --- what the engine wants

    def want(
        self,
        count: int,
        wanted: int,
        headroom: int,
        now: float,
        *,
        instead_bytes: int = 0,
        only_small: bool = False,
        urgent: bool = True,
    ) -> int:
        """Notes that the engine wants `count` indices, of which it did not get `wanted`. Returns how many are to be
        requested: `wanted`, but no more than may be mapped (`headroom`). `only_small`: not in large extents. `urgent`:
        whether the engine waits for them, or has nothing that it could evict instead; if not, none are requested for a
        while after a refusal. For example: an engine that wants 10 and finds 3 in the reserve calls `want(10, 7,
        headroom)`; with a headroom of 5 it misses 5."""
        if self.use == "emptied":
            self.use = "kept"
        self._marks.took(count, now)
        if not urgent and self.demand == "refused" and not self.requested and now < self._again_at:
            self.wanted, self.left = 0, False
            return 0
        self.wanted, self.left = wanted, False
        self.instead_bytes = instead_bytes
        self.missing = missing = min(wanted, headroom)
        if missing > 0:
            bulk = 1 < self._addresses.factor <= missing // _BULK
            self.demand = "large" if bulk and not only_small else "small"
        return missing

    def got(self, count: int) -> None:
        """Notes that the engine took `count` indices of those that it wanted."""
        self.wanted = max(0, self.wanted - count)

    @property
    def misses(self) -> bool:
        """Whether indices that the engine misses are requested, or are to be."""
        return self.missing > 0 or self.requested > 0

    @property
    def under_way(self) -> int:
        """Number of indices that are requested and not answered."""
        return self.requested + self._filling

    @property
    def awaited(self) -> bool:
        """Whether an answer of balloond may bring what the engine wants."""
        return (self.missing > 0 or self.requested > 0) and self.demand != "refused"

    def no_longer_awaited(self) -> None:
        """Notes that the engine stops waiting. What was not refused may still come; it stays in the reserve then."""
        if self.demand == "refused":
            self.wanted = 0

    def limited(self, limit: int) -> None:
        """Takes in a new limit: the engine does not wait for more than the limit allows, except for what was requested
        before. What was refused may be requested again at once."""
        self.missing = min(self.missing, max(self.requested, self._addresses.headroom(limit)))
        self._again_at = 0.0

    def offer(self, holes: int) -> None:
        """Begins an offer of the reserve. `holes`: number of the lowest addresses that the engine wants at which
        nothing is mapped; unless extents for them may still come, so many of the reserve go back after the offer."""
        # Ranks use the addresses that all of them have. Memory that one has mapped higher than the others is of no use
        # there: it goes back and is requested again for a lower address.
        if self.demand == "refused" or not self.missing:
            self._misplaced = min(holes, len(self._reserve))
        self.use = "offered"

    def end_offer(self, taken: int) -> None:
        """Ends an offer, of which the engine took `taken` indices."""
        if self.use == "offered":
            self.use = "kept"
        self.got(taken)
        self.left = self.wanted > 0

    @property
    def claimed(self) -> int:
        """Number of indices of the reserve that another stretch may not have, because the engine comes for them."""
        return 0 if self.left else self.wanted

    def empty(self) -> None:
        """Has the reserve emptied, and nothing requested before the engine wants extents again."""
        self.use = "emptied"
        self.missing = self.wanted = 0

    def make_way(self, count: int, now: float) -> int:
        """Has `count` indices of the reserve go back, because their memory is wanted in another stretch, and requests
        none for a while. Returns `count`."""
        self._making_way = max(self._making_way, count)
        self.pause(now)
        return count

    # --- time

    def idle(self, now: float) -> bool:
        """Whether growth has been away for long enough to shrink to the low mark."""
        return self._marks.idle(now)

    @property
    def above_low(self) -> bool:
        """Whether the reserve is above the low mark, to which an idle engine shrinks."""
        return len(self._reserve) > self._marks.low

    def forget_wanted(self) -> None:
        """Notes that the engine did not come for what it wanted."""
        self.wanted = 0

    def pause(self, now: float) -> None:
        """Requests nothing for the reserve for a while."""
        self._fill_at = now + self._refused_pause_s

    def end_pause(self) -> None:
        """Lets everything be requested again at once."""
        self._fill_at = self._again_at = 0.0

    # --- requests

    def fill_is_due(self, now: float) -> bool:
        """Whether the reserve has fallen so far that extents for it are to be requested."""
        return self.fill != "under_way" and now >= self._fill_at and self._marks.missing(len(self._reserve), now) > 0

    def requests(self, now: float, limit: int, running: bool, *, may_fill: bool = True) -> list[ExtentRequest]:
        """Requests to make of balloond now; they count as under way from then on. `may_fill`: whether one may be for
        the reserve."""
        found = []
        while (left := self._to_request(limit)) > 0 and self._unanswered < _UNANSWERED:
            size, count = self._part(left)
            self.requested += size * count
            self._unanswered += 1
            found.append(ExtentRequest(size, count, behind=left - size * count))
        if may_fill and self._may_fill(now):
            reserve = len(self._reserve) - self.wanted
            missing = min(self._marks.missing(reserve, now), self._addresses.headroom(limit))
            size, count = self._fill_part(missing, reserve, limit)
            self.fill = "under_way" if count > 0 else "ready"
            self._filling = size * count
            if count > 0:
                # Where all memory is taken a decode step would wait for each extent, so others have to give back ahead
                # of it.
                in_use = running and reserve < self._marks.low
                # Large extents are taken only where they are free. A request that waited for them would keep what is
                # free from small ones, those that the engine requests itself among them.
                found.append(ExtentRequest(size, count, is_fill=True, only_free=size > 1 or not in_use))
        return found

    def _to_request(self, limit: int) -> int:
        """Number of indices that are missing and not requested."""
        return min(self.missing, self._addresses.headroom(limit)) - self.requested

    def _part(self, left: int) -> tuple[int, int]:
        """(indices in an extent, number of such extents) of one more request for what the engine misses."""
        large = 0
        if self.demand == "large":
            factor = self._addresses.factor
            large = min(left // factor, len(self._addresses.free_large()) - self.requested // factor)
        return (self._addresses.factor, min(large, _LARGE_TOGETHER)) if large > 0 else (1, min(left, _TOGETHER))

    def _may_fill(self, now: float) -> bool:
        """Whether extents for the reserve may be requested now: only while nothing else is under way."""
        under_way = self.fill == "under_way" or self.requested or self.missing
        return self.use != "emptied" and not under_way and now >= self._fill_at

    def _fill_part(self, missing: int, reserve: int, limit: int) -> tuple[int, int]:
        """(indices in an extent, number of such extents) of a request for the reserve. Large extents are for fast
        growth, in which more is missing than one of them holds: the time that each extent takes of this process would
        then be waited for by the engine's thread."""
        factor = self._addresses.factor
        if 1 < factor <= missing and self.fill != "small_next":
            # What is above the mark would go back.
            most = min(self._marks.high - reserve, self._addresses.headroom(limit))
            large = min(-(-missing // factor), most // factor, len(self._addresses.free_large()))
            if large > 0:
                return factor, min(large, _LARGE_TOGETHER)
        return 1, min(missing, _TOGETHER)

    def answered(self, request: ExtentRequest, granted: int, refused: bool, now: float) -> None:
        """Takes in balloond's answer: `granted` extents, which are in the reserve now, and whether it refused the
        rest."""
        is_large = request.size > 1
        if request.is_fill:
            # Where no large extent is left, there may be enough for small ones.
            self.fill = "small_next" if refused and is_large else "ready"
            self._filling = 0
            if refused and not is_large:
                self.pause(now)
            return
        self.requested -= request.size * request.count
        self._unanswered -= 1
        self.missing = max(0, self.missing - request.size * granted)
        if refused and not is_large:
            self.demand = "refused"
            self.missing = 0
            self._again_at = now + self._refused_pause_s
        elif refused or self.demand == "refused":
            self.demand = "small"

    # --- giving back

    def surplus(self, now: float, limit: int, running: bool) -> tuple[int, int, int]:
        """Number of indices that have to leave the reserve: (for the limit, for reclaims, because they are not
        needed). Indices that make way for another stretch count among those for the limit."""
        whole = self._reserve.whole
        if self.use == "offered" or not whole:
            return 0, 0, 0
        if self.use == "emptied":
            return whole, 0, 0
        at_once, later = self._reclaims.extents()
        # A running engine keeps what its next steps need while it still looks for prefixes.
        kept = self._marks.low if running else 0
        reclaimed = at_once + min(later, max(0, whole - at_once - kept))
        unneeded = max(self._marks.surplus(len(self._reserve) - self.wanted, now), self._misplaced)
        return max(0, self._addresses.mapped - limit, self._making_way), reclaimed, unneeded

    def leave(self, now: float, limit: int, floor: int, running: bool) -> list[int]:
        """Takes the indices that have to go out of the reserve, in whole extents. Where no small extent is left, a
        large one leaves for a few of its indices; for a reclaim only if the floor holds."""
        over, reclaimed, unneeded = self.surplus(now, limit, running)
        if self.use != "offered":
            self._making_way = 0
        leaving = self._reserve.leave(over, more=True) if over else []
        if reclaimed > len(leaving):
            spare = self._addresses.mapped - len(leaving) - floor
            wanted = reclaimed - len(leaving)
            leaving += self._reserve.leave(wanted, more=spare >= wanted + self._addresses.factor - 1)
        if unneeded > len(leaving):
            leaving += self._reserve.leave(unneeded - len(leaving), more=False)
        if leaving:
            self._misplaced = 0
            self._reclaims.left(len(leaving))
        return leaving
