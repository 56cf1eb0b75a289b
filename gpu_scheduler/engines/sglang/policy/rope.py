"""Parameters of a rotary embedding as SGLang has to be given them so that its tables are those of Transformers, for the
contexts that are served. SGLang reads some keys differently, knows some by other names, and fails at some."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_ORIGINAL = "original_max_position_embeddings"
_THETA = 10_000.0
"""Base of the rotary embedding's wavelengths where a configuration has none."""
_STRETCHED = ("yarn", "longrope", "llama3")
"""Kinds whose parameters include the original length that they stretch."""
_ALL = ("rope_theta", "partial_rotary_factor")
_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", _ORIGINAL, "beta_fast", "beta_slow", "truncate"),
    "llama3": ("factor", _ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "longrope": (_ORIGINAL, "short_factor", "long_factor"),
}
"""Parameters that count, by kind. SGLang would stretch a context by the factor of a kind that has none."""


def for_sglang(told: Mapping[str, Any], positions: int, original: int | None, context_tokens: int) -> dict[str, Any]:
    """Parameters for SGLang. `told` are those that Transformers has for a model of `positions` positions, `original`
    ones where its configuration states that beside them. `context_tokens` is the longest request, 0 if not known.
    Parameters of an unknown kind stay as they are."""
    kind = told.get("rope_type", "default")
    kind = "longrope" if kind == "su" else kind
    if kind not in _NUMBERS:
        return dict(told)
    stretches = positions if original is None else original
    given = {_ORIGINAL: stretches, **told} if original is None else {**told, _ORIGINAL: original}
    if kind == "dynamic" and 0 < context_tokens <= positions:
        kind = "default"  # Transformers stretches only for longer requests, SGLang for all alike
    known = [*_ALL, *_NUMBERS[kind]]
    found = {key: given[key] for key in known if given.get(key) is not None}
    if kind in ("linear", "dynamic"):
        found["factor"] = float(found["factor"])  # SGLang would turn a whole number into a list
    if kind in _STRETCHED and kind != "llama3":
        stretched = float(given.get("factor") or positions / found[_ORIGINAL])
        scale = _attention_scale(kind, given, stretched, found[_ORIGINAL])
        if kind == "yarn":
            found |= {"factor": stretched, "attn_factor": scale / _yarn_scale(stretched)}
        else:
            found |= {"short_mscale": scale, "long_mscale": scale}
            if context_tokens == 0 or context_tokens > found[_ORIGINAL]:
                # SGLang would use the long factors for a step in which any request is that long, and the short ones for
                # the keys that the same requests left in the cache before.
                found["short_factor"] = found["long_factor"]
    return {**found, "rope_type": kind, "type": kind}


def for_latent(told: Mapping[str, Any], positions: int, on_cpu: bool) -> dict[str, Any]:
    """Parameters for SGLang's models with latent attention (MLA), which are written for DeepSeek's own form of YaRN:
    `mscale` and `mscale_all_dim` scale sines, cosines and the softmax there. `told` are those that Transformers has for
    a model of `positions` positions. `on_cpu`: SGLang has nothing but YaRN for these models there, which is the default
    embedding if it stretches by 1. Raises ValueError for a kind that is neither YaRN nor the default."""
    kind = told.get("rope_type", "default")
    if kind not in ("default", "yarn"):
        raise ValueError(f"rotary embeddings of type {kind!r} are not supported with latent attention")
    known = ("rope_theta", "factor", _ORIGINAL, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    if kind == "default":
        plain = {"rope_theta": told.get("rope_theta", _THETA), "rope_type": kind, "type": kind}
        return {**plain, "rope_type": "yarn", "type": "yarn", "factor": 1.0, _ORIGINAL: positions} if on_cpu else plain
    given = {_ORIGINAL: positions, **told}
    found = {key: given[key] for key in known if given.get(key) is not None}
    factor = found["factor"] = float(found.get("factor") or positions / found[_ORIGINAL])
    if told.get("attention_factor") is not None:
        own = _yarn_scale(factor, found.get("mscale", 1.0)) / _yarn_scale(factor, found.get("mscale_all_dim", 0.0))
        found["attn_factor"] = told["attention_factor"] / own
    return {**found, "rope_type": kind, "type": kind}


def _attention_scale(kind: str, told: Mapping[str, Any], factor: float, original: int) -> float:
    """Factor by which Transformers multiplies sines and cosines."""
    if told.get("attention_factor") is not None:
        return float(told["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if (mscale := told.get("mscale")) and (of_all := told.get("mscale_all_dim")):
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, of_all)
    return _yarn_scale(factor)


def _yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor for sines and cosines of a context that is `factor` times the original; 1 if it is not longer."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
