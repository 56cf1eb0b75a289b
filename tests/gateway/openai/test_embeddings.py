"""/v1/embeddings, from the body to the vectors, with groups that make them."""

from __future__ import annotations

import asyncio
import base64
import struct
from typing import Any

import httpx
import pytest

from gateway.openai.vectors import MOST_AT_ONCE
from protos import common_pb2
from tests.gateway import tokenizers
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running, place


def vector(ids: Any) -> list[float]:
    """Exact in 32 bits, and of length 1."""
    return [0.0, 1.0, 0.0] if len(ids) % 2 else [0.5, 0.5, 0.5**0.5]


async def embed(running: Running) -> None:
    running.tokens((), embedding=vector(running.submit.token_ids), finish=common_pb2.STOP)


@pytest.fixture
async def embedding(world: World) -> World:
    made = common_pb2.Embedding(dimensions=3, shortens=True)
    for group in world.groups:
        group.script = embed
    # With another name the new route is known to have come.
    await world.publish(
        world.route(place(world.groups[0]), name="e", embedding=made),
        world.route(place(world.groups[0])),
    )
    return world


def prompts_of(world: World, given: Any) -> list[list[int]]:
    """The token ids of an input; those of a text as the tokenizer puts them around it."""
    several = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    return [list(tokenizers.tiny().encode(one).ids) if isinstance(one, str) else one for one in several]


async def ask(world: World, given: Any, **more: Any) -> httpx.Response:
    return await world.http.post("/v1/embeddings", json={"model": "e", "input": given, **more})


def close(found: list[float], wanted: list[float]) -> bool:
    return found == pytest.approx(wanted, abs=1e-7)


@pytest.mark.parametrize(
    "given",
    ["hello", ["hello", "one two", "hello"], [5, 6, 7], [[5, 6, 7], [8, 9]]],
    ids=["text", "texts", "tokens", "lists of tokens"],
)
async def test_embeddings_of_several_prompts_are_in_their_order(embedding: World, given: Any) -> None:
    answer = (await ask(embedding, given)).json()
    prompts = prompts_of(embedding, given)
    assert answer["object"] == "list" and answer["model"] == "e"
    assert [one["index"] for one in answer["data"]] == list(range(len(prompts)))
    for one, prompt in zip(answer["data"], prompts, strict=True):
        assert one["object"] == "embedding" and close(one["embedding"], vector(prompt))
    tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    sent = [running.submit for running in embedding.groups[0].requests]
    assert all(submit.embed for submit in sent)
    assert sorted(list(submit.token_ids) for submit in sent) == sorted(prompts)


async def test_embeddings_are_base64_or_shortened_if_requested(embedding: World) -> None:
    whole = (await ask(embedding, [5, 6], encoding_format="base64")).json()["data"][0]["embedding"]
    assert close(list(struct.unpack("<3f", base64.b64decode(whole))), [0.5, 0.5, 0.5**0.5])
    short = (await ask(embedding, [5, 6], dimensions=2)).json()["data"][0]["embedding"]
    assert close(short, [0.5**0.5, 0.5**0.5])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": list(range(1, 514))}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 4}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "model": MODEL}, "model"),
    ],
)
async def test_embeddings_impossible_parameter_is_refused_by_name(
    embedding: World, body: dict[str, Any], param: str
) -> None:
    answer = await embedding.http.post("/v1/embeddings", json={"model": "e", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not embedding.groups[0].requests


async def test_embedding_prompt_may_fill_the_context(embedding: World) -> None:
    assert (await ask(embedding, list(range(1, 513)))).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_text_request_to_an_embedding_model_is_a_400(embedding: World, path: str) -> None:
    body = {"model": "e", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    answer = await embedding.http.post(path, json=body)
    assert answer.status_code == 400 and "ask /v1/embeddings" in answer.json()["error"]["message"]


async def test_embedding_is_made_at_another_place_when_one_fails(embedding: World) -> None:
    failed: list[Running] = []

    async def at_first(running: Running) -> None:
        if not failed:
            failed.append(running)
            running.finish(common_pb2.FAILED, "its engine died")
        else:
            await embed(running)

    embedding.groups[0].script = at_first
    await embedding.publish(
        embedding.route(
            *map(place, embedding.groups), name="e", embedding=common_pb2.Embedding(dimensions=3, shortens=True)
        )
    )
    embedding.groups[1].script = at_first
    answer = (await ask(embedding, [5, 6])).json()
    assert close(answer["data"][0]["embedding"], vector([5, 6])) and len(failed) == 1


async def test_embedding_request_answered_with_text_by_an_engine_is_a_503(embedding: World) -> None:
    embedding.groups[0].script = lambda running: _says(running)
    answer = await ask(embedding, "hello")
    assert answer.status_code == 503 and "no embedding" in answer.json()["error"]["message"]


async def _says(running: Running) -> None:
    running.tokens([5], finish=common_pb2.LENGTH)


async def test_embedding_request_of_many_prompts_has_only_some_in_flight_at_once(embedding: World) -> None:
    """Nor does a failure of one leave the others running."""
    there, go_on = asyncio.Event(), asyncio.Event()

    async def held(running: Running) -> None:
        there.set()
        await go_on.wait()
        await embed(running)

    group = embedding.groups[0]
    group.script = held
    asked = asyncio.get_running_loop().create_task(ask(embedding, [[5, 6]] * 1500))
    await group.arrived(MOST_AT_ONCE)
    # Another fits beside it, as it counts for what is in flight.
    other = asyncio.get_running_loop().create_task(ask(embedding, [[5]] * 500))
    await group.arrived(MOST_AT_ONCE + 1)
    go_on.set()
    assert len((await asked).json()["data"]) == 1500
    assert len((await other).json()["data"]) == 500
