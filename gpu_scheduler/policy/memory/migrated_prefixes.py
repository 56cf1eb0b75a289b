"""KV of prefixes that came here with a model that moved. Pure: `now` in seconds.

A request that continues here after the move is mostly in the engine's cache already, which the engine reports only once
the request has started: if each were costed as a whole uncached prompt, each would wait for the prefill of the one
before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KEPT_S = 5.0
"""Seconds for which a migrated prefix is remembered: requests interrupted by the move have been sent here by then."""


class MigratedPrefixes:
    """Prefixes that came lately, by model; those of an adapter by its name in engines (`policy/adapter_room.py`)."""

    def __init__(self) -> None:
        self._came: dict[str, list[tuple[float, list[int]]]] = {}

    def __repr__(self) -> str:
        return f"MigratedPrefixes({ {model: len(some) for model, some in self._came.items()} })"

    def came(self, model: str, sequences: Iterable[Sequence[int]], now: float) -> None:
        """Records that the KV of these token sequences, each from the beginning of a text, is in the engine's cache."""
        self._forget(now)
        self._came.setdefault(model, []).extend((now, list(tokens)) for tokens in sequences)

    def cached_tokens(self, model: str, token_ids: Sequence[int], now: float) -> int:
        """How many of the first tokens of a prompt are in the engine's cache."""
        self._forget(now)
        there = (tokens for _, tokens in self._came.get(model, ()))
        return max((len(tokens) for tokens in there if _begins(token_ids, tokens)), default=0)

    def _forget(self, now: float) -> None:
        for model, some in list(self._came.items()):
            kept = [(at, tokens) for at, tokens in some if now - at < KEPT_S]
            if kept:
                self._came[model] = kept
            else:
                del self._came[model]


def _begins(token_ids: Sequence[int], tokens: list[int]) -> bool:
    """Whether `token_ids` begin with `tokens`. Compares the last token first: hundreds of texts begin with one system
    prompt, and all are compared with all."""
    end = len(tokens)
    return 0 < end <= len(token_ids) and token_ids[end - 1] == tokens[-1] and list(token_ids[:end]) == tokens
