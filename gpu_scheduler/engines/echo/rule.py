"""The tokens that the echo engine "generates", and its "embeddings": pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot, inf

PERIOD = 8
"""The next token is the one this many tokens before; with a shorter context, its first."""


def next_token(context: Sequence[int]) -> int:
    """The token that follows `context` (not empty)."""
    return context[-PERIOD] if len(context) >= PERIOD else context[0]


def label_logprobs(context: Sequence[int], labels: Sequence[int]) -> list[float]:
    """Log-probabilities of `labels` after `context`: the token that follows is certain."""
    return [0.0 if label == next_token(context) else -inf for label in labels]


def embedding(token_ids: Sequence[int], dimensions: int) -> list[float]:
    """A vector of `dimensions` numbers and length 1: each token adds its position, counted from 1, at its id modulo
    `dimensions`."""
    vector = [0.0] * dimensions
    for position, token in enumerate(token_ids, start=1):
        vector[token % dimensions] += position
    length = hypot(*vector)
    return [value / length for value in vector]
