"""What the echo engine "generates": pure."""

from __future__ import annotations

from collections.abc import Sequence

PERIOD = 8
"""The next token is the one this many before; with a shorter context, its first."""


def next_token(context: Sequence[int]) -> int:
    """The token that follows `context` (not empty)."""
    return context[-PERIOD] if len(context) >= PERIOD else context[0]
