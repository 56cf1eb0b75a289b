"""Which vectors may be asked of a model, and how they are written."""

from __future__ import annotations

import base64
import struct

import pytest

from gateway.errors import BadField
from gateway.openai.vectors import as_base64, check, shortened
from gateway.request import Prompt, Request
from protos import common_pb2


def asked(dimensions: int | None = None, embeds: bool = True) -> Request:
    return Request(
        request_id="r",
        model="m",
        arrival_s=0,
        prompts=[Prompt(text="a")],
        sampling=common_pb2.Sampling(),
        limit_given=False,
        slo=common_pb2.Slo(),
        embeds=embeds,
        dimensions=dimensions,
    )


WHOLE = common_pb2.Embedding(dimensions=8)
ANY = common_pb2.Embedding(dimensions=8, shortens=True)
SOME = common_pb2.Embedding(dimensions=8, shortens=True, shorter=[2, 4])


@pytest.mark.parametrize(
    ("made", "dimensions", "why"),
    [
        (WHOLE, None, ""),
        (WHOLE, 8, ""),
        (WHOLE, 4, "have 8, and cannot be shortened"),
        (ANY, 1, ""),
        (ANY, 9, "have 8 at most"),
        (SOME, 4, ""),
        (SOME, 8, ""),
        (SOME, 3, "have one of 2, 4, 8"),
    ],
)
def test_vector_dimensions_are_accepted_only_as_the_model_allows(
    made: common_pb2.Embedding, dimensions: int | None, why: str
) -> None:
    model = common_pb2.ModelSpec(name="m", embedding=made)
    if not why:
        check(asked(dimensions), model)
        return
    with pytest.raises(BadField, match=why) as refused:
        check(asked(dimensions), model)
    assert refused.value.field == "dimensions"


@pytest.mark.parametrize(("embeds", "instead"), [(True, "makes text"), (False, "makes embeddings: ask /v1/embeddings")])
def test_model_of_the_wrong_kind_is_refused_with_the_endpoint_to_use(embeds: bool, instead: str) -> None:
    model = common_pb2.ModelSpec(name="m", embedding=None if embeds else WHOLE)
    with pytest.raises(BadField, match=instead) as refused:
        check(asked(embeds=embeds), model)
    assert refused.value.field == "model"


def test_shortened_vector_has_length_one_again() -> None:
    vector = [0.6, 0.0, 0.8]
    assert shortened(vector, 2) == [1.0, 0.0]
    assert shortened(vector, None) is vector and shortened(vector, 3) is vector
    assert shortened([0.0, 1.0], 1) == [0.0]


def test_base64_vector_is_of_32_bit_floats() -> None:
    assert struct.unpack("<2f", base64.b64decode(as_base64([0.5, -2.0]))) == (0.5, -2.0)
