"""The tokens that the echo engine "generates", and its "embeddings": pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot

PERIOD = 8
"""The next token is the one this many tokens before; with a shorter context, its first."""


def next_token(context: Sequence[int]) -> int:
    """The token that follows `context` (not empty)."""
    return context[-PERIOD] if len(context) >= PERIOD else context[0]


def embedding(token_ids: Sequence[int], dimensions: int) -> list[float]:
    """A vector of length 1: each token counts with its position, from 1, where its id says."""
    vector = [0.0] * dimensions
    for position, token in enumerate(token_ids, start=1):
        vector[token % dimensions] += position
    length = hypot(*vector)
    return [value / length for value in vector]
