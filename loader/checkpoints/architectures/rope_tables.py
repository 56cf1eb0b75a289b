"""Sizes of the tables of rotary embeddings that engines make for a model, by its config.json. Pure.

SGLang makes one table for each embedding that differs from the others, in float32, with a row for each position of the
context. All layers with that embedding share it. The tables lie with the weights: those of Gemma 4 31B take 805 MB for
its whole context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.checkpoints.architectures.classes import CLASSES, MAMBA
from loader.checkpoints.architectures.families import ModelShape

_ELEMENT_BYTES = 4
_ROWS_BESIDE = 264
"""Rows behind the context: 8 are of our engines (`CONTEXT_SLACK_TOKENS`), 256 of SGLang's
(`SGLANG_ROPE_CACHE_SAFETY_MARGIN`)."""
_ROWS_TOGETHER = 128
"""Rows are made in so many (`SGLANG_ROPE_CACHE_ALIGN`)."""


def row_bytes(shape: ModelShape, text: Mapping[str, Any]) -> int:
    """Bytes of one position's row in all tables together; 0 if positions are not rotated. `text`: the part of
    config.json that describes the language model."""
    known = CLASSES.get(shape.architecture)
    if known is not None and known.states == MAMBA:
        return 0
    return _ELEMENT_BYTES * _elements(shape, text)


def table_bytes(bytes_of_row: int, context_tokens: int) -> int:
    """Bytes of all tables for a context, on each device; `bytes_of_row`: those of a position."""
    return -(-(context_tokens + _ROWS_BESIDE) // _ROWS_TOGETHER) * _ROWS_TOGETHER * bytes_of_row


def _elements(shape: ModelShape, text: Mapping[str, Any]) -> int:
    if shape.latent is not None:
        return shape.latent.rotated
    if shape.full is not None:
        return shape.head_dim + shape.full.head_dim
    said = text.get("rope_parameters") or text.get("rope_scaling") or {}
    by_layer = [part for part in said.values() if isinstance(part, dict)] if isinstance(said, dict) else []
    if by_layer or text.get("rope_local_base_freq"):
        return max(2, len(by_layer)) * shape.head_dim
    if rotated := text.get("rotary_dim"):
        return int(rotated)
    share = text.get("partial_rotary_factor") or said.get("partial_rotary_factor") or 1
    return int(share * shape.head_dim)
