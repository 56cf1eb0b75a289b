"""Which requests have grammars that take too long. Pure."""

from __future__ import annotations

from typing import Any

SLOW_S, MOST_SLOW_S = 0.05, 1.0
"""Seconds of one call that follows a grammar, from which on it counts as slow; and the most seconds of a request's time
that may go into slow calls."""


def slow_of(batch: Any) -> frozenset[str]:
    """Names of the requests in a batch whose grammars take too long, by the clock of this process."""
    if not batch.has_grammar:
        return frozenset()
    return frozenset(request.rid for request in batch.reqs if getattr(request.grammar, "slow", False))
