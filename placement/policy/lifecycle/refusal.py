"""Refusal: a model that no group could hold even if it were alone there, with the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kv_kinds.layout import BESIDE_TOKENS, PADDING_STATES, KvLayout, attention
from placement.policy.kvpr import Group, Model, share
from placement.policy.lifecycle.decisions import Refuse


@dataclass(frozen=True, slots=True)
class LongestRequest:
    """The request for which a model's floor has room at least."""

    tokens: int
    kv: KvLayout
    """The model's kinds of KV on one device, states in whole extents."""
    position_bytes: int = 0
    """Bytes of the model's weights on one device for each token of the longest request: tables that are made for it."""


def refusal(model: Model, groups: Sequence[Group], longest: LongestRequest | None = None) -> Refuse | None:
    """Why no group could ever hold the model; None if one could. With its `longest` request the reason also tells
    whether a shorter one would fit."""
    if any(could_hold(model, group) for group in groups):
        return None
    if not groups:
        return Refuse(model.name, "no group is here")
    have = max(len(group.devices) for group in groups)
    if have < model.parts:
        return Refuse(model.name, f"it needs {model.parts} devices of one group, the largest group has {have}")
    capacity, largest = max((_nth_capacity(model, group), group.name) for group in groups)
    shorter = "" if longest is None else _shorter(longest, capacity - model.fixed)
    return Refuse(model.name, f"{arithmetic(model)}; the largest group, {largest}, has {capacity:,}{shorter}")


def _shorter(longest: LongestRequest, room: int) -> str:
    """Settings of the catalogue with which the floor would fit into `room` bytes, as the end of a sentence; empty where
    no floor would, or nothing is known of the KV. Floors are in whole extents, whose size is not known here."""
    kv = longest.kv
    if longest.position_bytes:  # tables shrink with the request as its KV does
        room += longest.tokens * longest.position_bytes
        kv = KvLayout((*kv.kinds, attention(longest.position_bytes)))
    if room <= 0 or not longest.kv:
        return ""
    beside = BESIDE_TOKENS * kv.marginal(0) + PADDING_STATES * sum(kind.bytes_per_state for kind in kv.kinds)
    tokens = kv.most_tokens(room - beside)
    if not tokens:
        needed = f"a request needs {beside + kv.bytes_of(1):,} bytes of KV before its first token"
        return f"; {needed}, and {room:,} are left for it: no context is short enough"
    if tokens >= longest.tokens:
        return "; with a smaller floor_tokens or context_tokens it would fit"
    settings = f"context_tokens (and any floor_tokens) of about {_about(tokens):,}"
    return f"; its longest request has {longest.tokens:,} tokens: with {settings} it would fit"


def _about(tokens: int) -> int:
    """The number with its first two digits alone."""
    unit = 10 ** max(0, len(str(tokens)) - 2)
    return tokens // unit * unit


def could_hold(model: Model, group: Group) -> bool:
    """Whether the group could hold the model if it were alone there."""
    return _nth_capacity(model, group) >= model.needed


def _nth_capacity(model: Model, group: Group) -> int:
    """Capacity of the worst of the devices that the model would take, in bytes; -1 if the group has too few devices."""
    capacities = sorted((device.capacity for device in group.devices), reverse=True)
    return capacities[model.parts - 1] if len(capacities) >= model.parts else -1


def arithmetic(model: Model) -> str:
    """The sum of bytes that one device has to hold, as text."""
    weights, quota = share(model.weights, model.parts), share(model.quota, model.parts)
    floor = share(model.floor, model.parts)
    total = f"weights {weights:,} + floor {floor:,} + engine quota {quota:,} = {model.needed:,} bytes"
    return total if model.parts == 1 else f"{total} on each of {model.parts} devices"
