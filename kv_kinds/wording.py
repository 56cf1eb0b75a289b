"""Kinds of KV as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kv_kinds.layout import ATTENTION, KvKind, KvLayout
from services.wording.sizes import size


def described(layout: KvLayout) -> str:
    """The kinds with their bytes: "96.0 KiB a token" if attention is the only one; otherwise each with its name, as in
    "attention 20.0 KiB a token, state 61.4 MiB a request"."""
    if [kind.name for kind in layout.kinds] == [ATTENTION]:
        return _bytes(layout.kinds[0])
    return ", ".join(f"{kind.name} {_bytes(kind)}" for kind in layout.kinds) or "none"


def short(layout: KvLayout) -> str:
    """The bytes of a token in all kinds, windows included, and those of a request's states, if it has any."""
    states = layout.bytes_of(1) - layout.marginal(0)
    token = size(layout.marginal(0))
    return f"{token} + {size(states)} a request" if states > 0 else token


def listed(layout: KvLayout) -> list[dict[str, Any]]:
    """The kinds as objects for JSON."""
    return [asdict(kind) for kind in layout.kinds]


def of_listed(kinds: Iterable[Mapping[str, Any]]) -> KvLayout:
    """The layout of which `listed` made these objects."""
    return KvLayout(tuple(KvKind(**kind) for kind in kinds))


def _bytes(kind: KvKind) -> str:
    if kind.states > 1:
        return f"{kind.states} times {size(kind.bytes_per_state)} a request"
    if kind.states:
        return f"{size(kind.bytes_per_state)} a request"
    within = f" of the last {kind.window_tokens}" if kind.window_tokens else ""
    return f"{size(kind.bytes_per_token)} a token{within}"
