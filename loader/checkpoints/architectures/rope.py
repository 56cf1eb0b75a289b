"""The context of a model, by the rotary embedding in its config.json. The context is longer than
`max_position_embeddings` if positions are stretched by a factor that is not in that number yet.

Published models describe the embedding in several ways: under `rope_scaling`, or `rope_parameters` since Transformers
5; its kind as `rope_type` or `type`; the length that is stretched in there, beside it, or as `max_position_embeddings`.
This module understands all of them as Transformers does. Engines make SGLang do so too
(`gpu_scheduler/engines/sglang/policy/rope.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from loader.checkpoints.config_values import CONFIG, check, check_given
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import COUNT, FLAG, FRACTION, POSITIVE, ValueKind, at_least, is_number, one_of

_WHERE = ("rope_scaling", "rope_parameters")
"""Keys of config.json that may describe the embedding. The first that is not empty counts."""
_ORIGINAL = "original_max_position_embeddings"
_FACTOR = {"factor": at_least(1)}
_NEEDS: dict[str, Mapping[str, ValueKind]] = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": _FACTOR,
    "llama3": {**_FACTOR, "low_freq_factor": POSITIVE, "high_freq_factor": POSITIVE},
    "longrope": {},
    "su": {},  # the first name of longrope
}
"""Values that each known kind of embedding has to have."""
_MAY_HAVE: Mapping[str, ValueKind] = {"rope_theta": POSITIVE, "partial_rotary_factor": FRACTION}
"""Kinds of the values that engines read, if they are there, for every kind of embedding."""
_BY_LAYER_MAY_HAVE = {
    **_MAY_HAVE,
    "factor": POSITIVE,
    "rope_type": one_of(*_NEEDS, "proportional"),
    "type": one_of(*_NEEDS, "proportional"),
}
"""Kinds of the values that engines read, if they are there, in models whose layers may have embeddings of different
kinds."""
_LONGROPE = {**_FACTOR, "attention_factor": at_least(0)}
_KIND_MAY_HAVE: Mapping[str, Mapping[str, ValueKind]] = {
    "yarn": {
        "beta_fast": POSITIVE,
        "beta_slow": POSITIVE,
        "attention_factor": at_least(0),
        "mscale": at_least(0),
        "mscale_all_dim": at_least(0),
        "truncate": FLAG,
    },
    "longrope": _LONGROPE,
    "su": _LONGROPE,
}
"""Kinds of further values that engines read, if they are there, by the kind of embedding."""


def context_tokens(config: Mapping[str, Any], positions: int) -> int:
    """Most tokens of a prompt with its answer, for a model whose `max_position_embeddings` is `positions`. Raises
    BrokenCheckpoint naming a key that is wrong."""
    where, kind, rope = _written(config)
    original = config.get(_ORIGINAL) or rope.get(_ORIGINAL) or positions
    check(CONFIG, _ORIGINAL, original, COUNT)
    if kind == "yarn" and rope.get("factor") is None:
        return max(original, positions)
    for key, needed in _NEEDS[kind].items():
        check(CONFIG, f"{where}.{key}", rope.get(key), needed)
    match kind:
        case "linear" | "dynamic":
            return _stretched(rope["factor"], positions)
        case "yarn":
            return _stretched(rope["factor"], original)
        case _:  # the others have their stretched length in max_position_embeddings
            return positions


def check_by_layer(config: Mapping[str, Any]) -> None:
    """Checks a model whose rotary embeddings may differ by kind of layer. Raises BrokenCheckpoint for values with which
    engines cannot compute."""
    for where in _WHERE:
        said = config.get(where)
        if said is None:
            continue
        if not isinstance(said, dict):
            raise BrokenCheckpoint(f"{CONFIG}: {where} is not an object")
        parts: dict[str, Any] = {where: said}
        if any(isinstance(part, dict) for part in said.values()):
            parts = {f"{where}.{kind}": said.get(kind) for kind in sorted(set(config.get("layer_types") or said))}
        for key, part in parts.items():
            if not isinstance(part, dict):
                raise BrokenCheckpoint(f"{CONFIG}: {key} is not an object")
            check_given(CONFIG, part, _BY_LAYER_MAY_HAVE, key)


def check_kind(config: Mapping[str, Any], kinds: Sequence[str], values: Mapping[str, ValueKind]) -> None:
    """Raises BrokenCheckpoint for an embedding that is of none of these kinds, or for a value that is not of the kind
    which `values` has for its key."""
    where, kind, rope = _written(config)
    if kind not in kinds:
        raise BrokenCheckpoint(f"{CONFIG}: {where} is of type {kind!r}, where only {' and '.join(kinds)} are supported")
    check_given(CONFIG, rope, values, where)


def _stretched(factor: float, positions: int) -> int:
    """`factor` times `positions`, rounded down. Raises BrokenCheckpoint if that is no number."""
    try:
        return int(factor * positions)
    except OverflowError:
        raise BrokenCheckpoint(f"{CONFIG}: the context is {positions} positions {factor:g} times") from None


def check_factors(config: Mapping[str, Any], head_dim: int) -> None:
    """Raises BrokenCheckpoint for lists of factors that do not suit heads of `head_dim` elements, and for other values
    with which engines cannot compute."""
    where, kind, rope = _written(config)
    check_given(CONFIG, rope, {**_MAY_HAVE, **_KIND_MAY_HAVE.get(kind, {})}, where)
    if kind in ("longrope", "su"):
        for key in ("short_factor", "long_factor"):
            _check_list(rope.get(key), f"{where}.{key}", head_dim // 2)


def _written(config: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """(key under which the embedding is described, its kind, its values)."""
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


def _check_list(value: Any, key: str, length: int) -> None:
    if not isinstance(value, list) or len(value) != length or not all(map(is_number, value)):
        raise BrokenCheckpoint(f"config.json: {key} is not a list of {length} numbers, one for each pair of a head")
