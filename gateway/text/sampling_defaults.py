"""Sampling parameters that a request leaves open: its model's generation_config.json gives them, as in SGLang's and
vLLM's servers; where that says nothing, OpenAI's defaults hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from protos import common_pb2

OPEN: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a request that a model may fill in."""


def filled(sampling: common_pb2.Sampling, left: Collection[str], model: common_pb2.ModelSpec) -> common_pb2.Sampling:
    """`sampling` with the model's values for the fields in `left`, which the client left open; the same object if the
    model has no values for them."""
    said = [name for name in left if model.sampling.HasField(name)]
    if not said:
        return sampling
    found = common_pb2.Sampling()
    found.CopyFrom(sampling)
    for name in said:
        setattr(found, name, getattr(model.sampling, name))
    return found
