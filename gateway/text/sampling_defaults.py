"""What a request leaves open of how its tokens are drawn: its model says, by the generation_config.json of its
checkpoint, as in SGLang's and vLLM's servers; where that says nothing, OpenAI's defaults hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from protos import common_pb2

OPEN: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a request that a model may fill in."""


def filled(sampling: common_pb2.Sampling, left: Collection[str], model: common_pb2.ModelSpec) -> common_pb2.Sampling:
    """`sampling` with what the model says of the fields of OPEN that its client `left` open; the same object where the
    model says nothing of them."""
    said = [name for name in left if model.sampling.HasField(name)]
    if not said:
        return sampling
    found = common_pb2.Sampling()
    found.CopyFrom(sampling)
    for name in said:
        setattr(found, name, getattr(model.sampling, name))
    return found
