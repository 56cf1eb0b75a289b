"""Token rates: a window of 60 s, and a shorter one beside it so that a burst counts before it is over.

The rate is the higher of the two: it rises sooner with a burst and falls over a minute (the paper's sensitivity
study finds 60 s stable; a model that just woke has no minute to show). Tokens are counted in buckets, so that an
observation costs the same whatever the rate, and each window is its number of complete buckets plus the part of the
present one.
"""

from __future__ import annotations

_BUCKET_S = 1.0
"""Seconds of a bucket: a thirtieth of the short window or less, and few buckets to go through."""


class RateWindow:
    """Tokens per second of one model; prompt tokens and generated tokens count alike."""

    __slots__ = ("_at", "_counts", "_long", "_short", "_short_n")

    def __init__(self, *, window_s: float = 60.0, short_s: float = 5.0) -> None:
        """Sizes in seconds; both windows have to be whole numbers of buckets. Raises ValueError if the short window is
        empty or longer than the other."""
        n, short_n = round(window_s / _BUCKET_S), round(short_s / _BUCKET_S)
        if not 0 < short_n <= n:
            raise ValueError(f"bad window: {window_s=} {short_s=}")
        self._counts = [0] * (n + 1)  # the present bucket and n complete ones, in a ring
        self._short_n = short_n
        self._long = self._short = 0  # sums of the complete buckets and the present one
        self._at: int | None = None  # number of the present bucket

    def counted(self, total: int, before: int, now: float) -> None:
        """Counts what a counter that stood at `before` has counted until `now`, when it stands at `total`. A counter
        that fell belongs to a model that came anew."""
        self.observe(total - before if total > before else total, now)

    def observe(self, tokens: int, now: float) -> None:
        """Counts `tokens` that were processed by `now` (seconds). A `now` earlier than the last one counts for the last
        bucket."""
        at = self._advance(now)
        self._counts[at % len(self._counts)] += tokens
        self._long += tokens
        self._short += tokens

    def rate(self, now: float) -> float:
        """Tokens per second: the higher of the two windows."""
        present_s = self._present_s(now)
        long = self._long / (_BUCKET_S * (len(self._counts) - 1) + present_s)
        return max(long, self._short / (_BUCKET_S * self._short_n + present_s))

    def _present_s(self, now: float) -> float:
        """Seconds of the present bucket that have passed."""
        return min(max(0.0, now - self._advance(now) * _BUCKET_S), _BUCKET_S)

    def _advance(self, now: float) -> int:
        """Makes the bucket of `now` the present one. Takes at most one step for each bucket of the ring."""
        at = int(now // _BUCKET_S)
        if self._at is None:
            self._at = at
        size = len(self._counts)
        if at - self._at >= size:
            self._counts = [0] * size
            self._long = self._short = 0
            self._at = at
        while self._at < at:
            self._at += 1
            leaves_short = (self._at - self._short_n - 1) % size
            self._short -= self._counts[leaves_short]
            slot = self._at % size
            self._long -= self._counts[slot]
            self._counts[slot] = 0
        return self._at
