"""Sizes of the tables of rotary embeddings that engines make for a model, by its config.json. Pure.

SGLang makes one table for each embedding that differs from the others, in float32, with a row for each position of the
context that is served. All layers with that embedding share it. The tables lie with the weights: those of Gemma 4 31B
take 805 MB for its whole context. Those of LongRoPE do not lie there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.checkpoints.architectures.classes import CLASSES, MAMBA
from loader.checkpoints.architectures.families import ModelShape

_ELEMENT_BYTES = 4
_ROWS_BESIDE = 264
"""Rows of a table behind the context: 8 are of our engines (`CONTEXT_SLACK_TOKENS`), 256 of SGLang's
(`SGLANG_ROPE_CACHE_SAFETY_MARGIN`)."""
_ROWS_TOGETHER = 128
"""The number of a table's rows is a multiple of this (`SGLANG_ROPE_CACHE_ALIGN`)."""


def row_bytes(shape: ModelShape, text: Mapping[str, Any]) -> int:
    """Bytes of a position's row in the tables that lie with the weights, all together; 0 without such tables.
    `text`: the part of config.json that describes the language model."""
    known = CLASSES.get(shape.architecture)
    if (known is not None and known.states == MAMBA) or _is_longrope(text):
        return 0
    return _ELEMENT_BYTES * _elements(shape, text)


def table_bytes(bytes_of_row: int, context_tokens: int) -> int:
    """Bytes of the tables that are made for a context of so many tokens, on each device; `bytes_of_row`: those of a
    position's row."""
    return -(-(context_tokens + _ROWS_BESIDE) // _ROWS_TOGETHER) * _ROWS_TOGETHER * bytes_of_row


def _embedding(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the rotary embedding; empty: nothing."""
    said = text.get("rope_parameters") or text.get("rope_scaling")
    return said if isinstance(said, dict) else {}


def _is_longrope(text: Mapping[str, Any]) -> bool:
    said = _embedding(text)
    return said.get("rope_type", said.get("type")) in ("longrope", "su")


def _elements(shape: ModelShape, text: Mapping[str, Any]) -> int:
    """Elements of a position's rows in all tables: those that are rotated, once for each embedding."""
    if shape.latent is not None:
        return shape.latent.rotated
    if shape.full is not None:
        return shape.head_dim + shape.full.head_dim
    said = _embedding(text)
    by_layer = [part for part in said.values() if isinstance(part, dict)]
    if by_layer or text.get("rope_local_base_freq"):
        return max(2, len(by_layer)) * shape.head_dim
    rotated, share = text.get("rotary_dim"), text.get("partial_rotary_factor") or said.get("partial_rotary_factor")
    if isinstance(rotated, int) and 0 < rotated < shape.head_dim:
        return rotated
    return int(share * shape.head_dim) if isinstance(share, (int, float)) and 0 < share < 1 else shape.head_dim
