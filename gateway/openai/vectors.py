"""Checks of requests for embeddings, and how a vector is made that has the requested form. No I/O."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from math import hypot

from gateway.errors import BadField
from gateway.request import Request
from protos import common_pb2

MOST_AT_ONCE = 64
"""The most prompts of one request that are in flight together: enough to fill an engine's steps, but less than all that
a gateway or a shared queue takes."""


def check(request: Request, model: common_pb2.ModelSpec) -> None:
    """Raises BadField if the request is not for what the model makes, or wants dimensions that the model does not
    have."""
    if model.HasField("reranker") and model.HasField("embedding"):
        if not request.ranks:
            raise BadField(f"The model '{model.name}' ranks documents: ask /v1/rerank.", "model", "wrong_task")
    elif request.embeds != model.HasField("embedding"):
        instead = "text: ask for completions" if request.embeds else "embeddings: ask /v1/embeddings"
        raise BadField(f"The model '{model.name}' makes {instead}.", "model", "wrong_task")
    if request.dimensions is not None and (problem := _problem(request.dimensions, model.embedding)):
        raise BadField(f"'dimensions' is {request.dimensions}: {problem}.", "dimensions")


def _problem(dimensions: int, made: common_pb2.Embedding) -> str:
    """Why the model's embeddings cannot have so many dimensions; empty if they can."""
    if dimensions == made.dimensions:
        return ""
    if not made.shortens:
        return f"this model's embeddings have {made.dimensions}, and cannot be shortened"
    if made.shorter and dimensions not in made.shorter:
        choices = ", ".join(map(str, [*made.shorter, made.dimensions]))
        return f"this model's embeddings have one of {choices}"
    if dimensions > made.dimensions:
        return f"this model's embeddings have {made.dimensions} at most"
    return ""


def shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The vector's first `dimensions` values, scaled to length 1 again; the vector itself if `dimensions` is None."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    first = vector[:dimensions]
    length = hypot(*first) or 1.0
    return [value / length for value in first]


def as_base64(vector: Sequence[float]) -> str:
    """The vector as 32-bit floats in base64, which OpenAI's clients read."""
    return base64.b64encode(array("f", vector).tobytes()).decode()
