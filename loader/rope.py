"""For how many positions a model's rotary embedding is made, by config.json: its context, which is longer than
`max_position_embeddings` where positions are stretched by a factor that this key does not have yet.

Published models write it down in several ways: `rope_scaling`, or `rope_parameters` since Transformers 5; the kind as
`rope_type` or `type`; the length that is stretched there, beside it, or as `max_position_embeddings`. They are
understood as Transformers does. Engines see to it that theirs agree (`gpu_scheduler/engines/sglang/rope.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loader.errors import BrokenCheckpoint

_WHERE = ("rope_scaling", "rope_parameters")
"""The first that says something counts."""
_ORIGINAL = "original_max_position_embeddings"
_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": (),
    "su": (),  # what longrope was called at first
}
"""The kinds that are known, and the numbers that each has to have."""


def context_tokens(config: Mapping[str, Any], positions: int) -> int:
    """The longest prompt with its answer that a model can take whose `max_position_embeddings` is `positions`. Raises
    BrokenCheckpoint naming the key that is wrong."""
    where, kind, rope = _written(config)
    original = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or positions
    if type(original) is not int or original <= 0:
        raise BrokenCheckpoint(f"config.json: {_ORIGINAL} = {original!r} is not a positive whole number")
    if kind == "yarn" and rope.get("factor") is None:
        return max(original, positions)
    for key in _NEEDS[kind]:
        _check_number(rope.get(key), f"{where}.{key}", least=1.0 if key == "factor" else 0.0)
    match kind:
        case "linear" | "dynamic":
            return int(rope["factor"] * positions)
        case "yarn":
            return int(rope["factor"] * original)
        case _:  # the others have their stretched length in max_position_embeddings
            return positions


def check_factors(config: Mapping[str, Any], head_dim: int) -> None:
    """Raises BrokenCheckpoint for lists of factors that do not suit heads of that size."""
    where, kind, rope = _written(config)
    if kind in ("longrope", "su"):
        for key in ("short_factor", "long_factor"):
            _check_list(rope.get(key), f"{where}.{key}", head_dim // 2)


def _written(config: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """The key that counts, the kind of embedding, and what is said of it."""
    where = next((key for key in _WHERE if config.get(key)), _WHERE[0])
    rope = config.get(where) or {}
    if not isinstance(rope, dict):
        raise BrokenCheckpoint(f"config.json: {where} = {rope!r} is not an object")
    if any(isinstance(value, dict) for value in rope.values()):
        raise BrokenCheckpoint(f"config.json: {where} differs by kind of layer, which is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _NEEDS:
        raise BrokenCheckpoint(
            f"config.json: {where} is of type {kind!r}, which is not supported; these are: {', '.join(_NEEDS)}"
        )
    return where, kind, rope


def _check_number(value: Any, key: str, least: float) -> None:
    if not _is_number(value) or value < least:
        raise BrokenCheckpoint(f"config.json: {key} = {value!r} is not a number of {least:g} or more")


def _check_list(value: Any, key: str, length: int) -> None:
    if not isinstance(value, list) or len(value) != length or not all(map(_is_number, value)):
        raise BrokenCheckpoint(f"config.json: {key} is not a list of {length} numbers, one for each pair of a head")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
