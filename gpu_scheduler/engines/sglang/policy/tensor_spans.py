"""Places of tensors in a weights range: which bytes are taken, and where all would lie without gaps. Pure arithmetic; a
span is (first byte, byte behind the last)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]


class Places:
    """The bytes of a range that are taken, from its start to `used`. What is released before that is taken again first,
    so that tensors which replace others of their size need no more bytes."""

    def __init__(self, align_bytes: int) -> None:
        self._align = align_bytes
        self.used = 0
        """Byte behind the last one that was ever taken; a multiple of the alignment."""
        self._free: list[Span] = []
        """Spans below `used` that are not taken, by address; none touches the next."""
        self.released = False
        """Whether a place was ever released, and so may have been taken by another tensor."""

    def take(self, nbytes: int) -> int:
        """Takes a place of `nbytes`, the first that is large enough; returns the byte at which it starts."""
        size = self._up(nbytes)
        for number, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[number : number + 1] = [(start + size, end)] if start + size < end else []
                return start
        start, self.used = self.used, self.used + size
        return start

    def release(self, before: Iterable[Span], after: Iterable[Span]) -> None:
        """Releases places that tensors had `before` and none has `after`, with the padding behind them."""
        released = without(map(self._outward, before), map(self._outward, after))
        self._free = joined([*self._free, *released])
        self.released = self.released or bool(released)

    def restart(self, used: int) -> None:
        """Forgets all places but the first `used` bytes, which are taken."""
        self._free, self.used = [], self._up(used)

    def _outward(self, span: Span) -> Span:
        return span[0] // self._align * self._align, self._up(span[1])

    def _up(self, nbytes: int) -> int:
        return -(-nbytes // self._align) * self._align


def joined(spans: Iterable[Span]) -> list[Span]:
    """The bytes of `spans` in the fewest spans, by address. Spans that touch become one."""
    return _merged(spans, apart=1)


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """The bytes of `spans` that are in none of `others`."""
    found: list[Span] = []
    taken = joined(others)
    for start, end in joined(spans):
        for first, last in taken:
            if last > start and first < end:
                if first > start:
                    found.append((start, first))
                start = max(start, last)
        if start < end:
            found.append((start, end))
    return found


def overlapping(spans: Iterable[Span]) -> list[Span]:
    """`spans` by address; those that have bytes in common become one."""
    return _merged(spans, apart=0)


def _merged(spans: Iterable[Span], apart: int) -> list[Span]:
    """`spans` by address; one that begins less than `apart` bytes behind the end of those before it joins them."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1] + apart:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def moved_down(spans: Sequence[Span], align_bytes: int) -> list[int]:
    """New starts of spans that are in order and do not overlap, each as low as it can be behind the one before it. The
    start modulo the alignment stays, and so nothing moves up."""
    starts: list[int] = []
    end = 0
    for first, last in spans:
        start = end + (first - end) % align_bytes
        starts.append(start)
        end = start + last - first
    return starts
