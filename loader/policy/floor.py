"""The floor of a model: KV on each of its devices that it can always have, enough for its longest request."""

from __future__ import annotations

BESIDE_TOKENS = 192
"""Tokens of KV beside those of a request. SGLang begins a request once more than its prompt and its answer fit: a page
of at most 64 tokens stays empty, one is for the request's own last page, and one for what it rounds. A request as long
as the context would wait for ever otherwise, and all behind it."""


def floor_bytes(context_tokens: int, floor_tokens: int, kv_bytes_per_token: int, extent_bytes: int) -> int:
    """Bytes of KV for `floor_tokens` (0: as few as possible) or one longest request, whichever is more, in whole
    extents."""
    tokens = max(floor_tokens, context_tokens + BESIDE_TOKENS)
    return -(-tokens * kv_bytes_per_token // extent_bytes) * extent_bytes
