"""The floor of a model: KV on each of its devices that it can always have, enough for its longest request."""

from __future__ import annotations

from kv_kinds.layout import BESIDE_TOKENS, PADDING_STATES, KvKind, KvLayout


def floor_bytes(context_tokens: int, floor_tokens: int, layout: KvLayout, extent_bytes: int) -> int:
    """Bytes of KV for `floor_tokens` (0: as few as possible) or for one request of `context_tokens`, whichever is more.
    Each kind has whole extents of its own."""
    return sum(kind_floor_bytes(context_tokens, floor_tokens, kind, extent_bytes) for kind in layout.kinds)


def kind_floor_bytes(context_tokens: int, floor_tokens: int, kind: KvKind, extent_bytes: int) -> int:
    """Bytes of a floor for one kind. A floor of more tokens than a context is for several requests, of which each but
    the last fills its context: a window holds its part of each, and a pool of states those of each, and one for the
    empty places of a batch."""
    requests = max(1, -(-floor_tokens // max(1, context_tokens)))
    if kind.bytes_per_state:
        state_bytes = -(-kind.bytes_per_state // extent_bytes) * extent_bytes
        return (requests * kind.states + PADDING_STATES) * state_bytes
    if kind.window_tokens:
        held = kind.tokens_of(context_tokens)
        tokens = max(min(floor_tokens, requests * held), held + BESIDE_TOKENS)
    else:
        tokens = max(floor_tokens, context_tokens + BESIDE_TOKENS)
    return -(-tokens * kind.bytes_per_token // extent_bytes) * extent_bytes
