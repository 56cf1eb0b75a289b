"""Which link of which copy moves what next.

A link is a device's own way to host memory, or from one device to another. Every link asks for work when it has room in
its window, so one that is twice as fast carries twice as much. A link whose device is busy with something else is
spared: it carries at most a part of what the free ones carry, and nothing where they would be done without it as soon.

A copy alone goes over all links that it was given. A link that is another running copy's own is left to that one, by
copies that begin later and by those under way: the ranks of a model, loaded at once, keep to a link each. So two copies
to different devices each go on over their own link, and take turns on links that are no copy's own; two copies to one
device take turns on all of its links. No copy is left without a link: a copy whose own has failed keeps the others, and
has turns there. A link that was left is left for good, because extents are mapped for the links that a copy has: a copy
that gave links up ends without them even if the others have ended long before, and fails where its own does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar


class CopyWork(Protocol):
    """Some bytes of a copy that one link moves at once."""

    @property
    def nbytes(self) -> int: ...


W = TypeVar("W", bound=CopyWork)


class _Copy(Generic[W]):
    """What one copy has left to move, and the links that it goes over."""

    def __init__(self, own: str, total_bytes: int, busy: dict[str, float]) -> None:
        self.own = own
        """The link of the copy's own device."""
        self.left_bytes = total_bytes
        """Bytes that no link has taken yet, whether offered or not."""
        self.busy = busy
        """Part of its time, 0 to 1, that each link which works for the copy gives to others."""
        self.free: list[str] = []
        """The least busy of those links."""
        self.offered: deque[W] = deque()
        self.carried = dict.fromkeys(busy, 0)
        """Bytes that each link has taken."""
        self.under_way = dict.fromkeys(busy, 0)
        """Bytes that each link has taken and not done."""
        self.find_free()

    def find_free(self) -> None:
        least = min(self.busy.values(), default=0.0)
        self.free = [link for link, busy in self.busy.items() if busy == least]


class Links(Generic[W]):
    """All copies under way and all links, by name. A copy is a number that the caller chooses.

    The window limits the bytes that a link has under way, over all copies; work that is larger than the window goes
    alone.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._copies: dict[int, _Copy[W]] = {}
        self._turns: dict[str, deque[int]] = {}
        """Copies that use each link; the first is the next to be served."""
        self._under_way: dict[str, int] = {}

    def open(self, copy: int, links: Sequence[str], total_bytes: int, busy: Mapping[str, float] | None = None) -> None:
        """Begins a copy of `total_bytes`; the first link is its device's own. `busy` has the part of their time, 0 to
        1, that the links' devices work for others; 0 for those that it does not name."""
        own = links[0]
        for number, other in self._copies.items():
            if other.own != own and other.own in other.busy:
                self.leave(own, number)
        taken = {other.own for other in self._copies.values() if other.own in other.busy} - {own}
        used = [link for link in links if link not in taken]
        self._copies[copy] = _Copy(own, total_bytes, {link: (busy or {}).get(link, 0.0) for link in used})
        for link in used:
            self._turns.setdefault(link, deque()).append(copy)

    def of(self, copy: int) -> tuple[str, ...]:
        """Links that carry the copy; none is ever added."""
        return tuple(self._copies[copy].busy)

    def spares(self, copy: int) -> bool:
        """Whether some of its links leave work to others."""
        state = self._copies[copy]
        return len(state.free) < len(state.busy)

    def offer(self, copy: int, work: W) -> None:
        """Adds work that may be moved from now on."""
        self._copies[copy].offered.append(work)

    def take(self, link: str) -> tuple[int, W] | None:
        """(copy, work) that the link is to move now; None when it has to wait, for room or for work."""
        turns = self._turns.get(link, ())
        for number in turns:
            copy = self._copies[number]
            if not copy.offered:
                continue
            nbytes, under_way = copy.offered[0].nbytes, self._under_way.get(link, 0)
            if _spared(copy, link, nbytes):
                continue
            if under_way and under_way + nbytes > self._window_bytes:
                return None  # no copy passes the one whose turn it is, or small work would starve large
            if len(turns) > 1:
                self._turns[link].remove(number)
                self._turns[link].append(number)
            self._under_way[link] = under_way + nbytes
            copy.under_way[link] += nbytes
            copy.carried[link] += nbytes
            copy.left_bytes -= nbytes
            return number, copy.offered.popleft()
        return None

    def done(self, link: str, copy: int, work: W) -> None:
        """Ends work that the link has moved."""
        nbytes = work.nbytes
        self._under_way[link] -= nbytes
        self._copies[copy].under_way[link] -= nbytes

    def failed(self, link: str, copy: int, work: W) -> bool:
        """Takes back work that the link could not move: another link will, and this one gets no more of the copy.
        Returns False when there is no other. What else of the copy the link has under way is done, or fails, by
        itself."""
        self.done(link, copy, work)
        state = self._copies[copy]
        state.left_bytes += work.nbytes
        state.offered.appendleft(work)
        return self.leave(link, copy)

    def leave(self, link: str, copy: int) -> bool:
        """Takes the link from the copy. Returns False when it has no other."""
        state = self._copies[copy]
        if state.busy.pop(link, None) is not None:
            self._turns[link].remove(copy)
            state.find_free()
        return bool(state.busy)

    def withdraw(self, copy: int) -> None:
        """Stops handing out work of the copy. What is under way has yet to be done, or to fail."""
        for link in self.of(copy):
            self.leave(link, copy)

    def under_way(self, copy: int) -> int:
        """Bytes of the copy that links have taken and not done."""
        return sum(self._copies[copy].under_way.values())

    def close(self, copy: int) -> None:
        """Ends a copy of which nothing is under way any more."""
        self.withdraw(copy)
        del self._copies[copy]

    def users(self, link: str) -> tuple[int, ...]:
        """The copies that go over the link, those that were withdrawn left out."""
        return tuple(self._turns.get(link, ()))


def _spared(copy: _Copy[W], link: str, nbytes: int) -> bool:
    """Whether the link leaves this work of the copy to others. The least busy ones never do, so that every copy ends.
    A busier one carries at most (1 - busy) times what one of those has carried, and only where it would be done with
    the work before they are done with all that is left, were all links equally fast."""
    if link in copy.free:
        return False
    if copy.carried[link] + nbytes > (1 - copy.busy[link]) * max(copy.carried[other] for other in copy.free):
        return True
    theirs = copy.left_bytes + sum(copy.under_way[other] for other in copy.free)
    return len(copy.free) * (copy.under_way[link] + nbytes) >= theirs
