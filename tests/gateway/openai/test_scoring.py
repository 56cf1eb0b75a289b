"""/v1/score and /v1/rerank, from the body to the answer, with groups that score label tokens."""

from __future__ import annotations

import asyncio
from math import exp, log
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.openai.vectors import MOST_AT_ONCE
from gateway.text.reranking import probabilities, relevance
from protos import common_pb2
from tests.gateway import tokenizers
from tests.gateway.conftest import MODEL, World
from tests.gateway.fakes import Running, place

ROLES = "{% for m in messages %}{% if m.role in ('query', 'document') %}<{{ m.content }}>{% endif %}{% endfor %}"
JUDGE = 'The answer can only be "yes" or "no". {{ instruct | default("usual") }}: {{ messages[0].content }}'
TWO_USERS = JUDGE + " {{ messages[1].content }}"
RERANKER = common_pb2.Reranker(yes_token_id=8, no_token_id=9)


async def score(running: Running) -> None:
    """A label is the likelier the longer the prompt, and the smaller its id."""
    submit = running.submit
    values = [-label / (1 + len(submit.token_ids)) for label in submit.sampling.label_token_ids]
    running.tokens((), label_logprobs=values, finish=common_pb2.LENGTH)


def expected(ids: Any, labels: Any) -> list[float]:
    return [exp(-label / (1 + len(ids))) for label in labels]


@pytest.fixture
async def scoring(world: World) -> World:
    for group in world.groups:
        group.script = score
    return world


@pytest.fixture
async def ranking(scoring: World, tmp_path: Path) -> World:
    """Its model "r" has a template with roles, "u" one for two messages of a user, and "e" makes embeddings."""
    folders = {
        name: tokenizers.write(tokenizers.tiny(), tmp_path / name, template)
        for name, template in (("r", ROLES), ("u", TWO_USERS))
    }
    routes = []
    for name, folder in folders.items():
        route = scoring.route(place(scoring.groups[0]), name=name)
        route.model.path = folder
        route.model.reranker.CopyFrom(RERANKER)
        routes.append(route)
    embedder = scoring.route(
        place(scoring.groups[0]), name="e", embedding=common_pb2.Embedding(dimensions=3, shortens=True)
    )
    await scoring.publish(*routes, embedder, scoring.route(place(scoring.groups[0])))
    return scoring


async def rank(world: World, documents: Any, path: str = "/v1/rerank", **more: Any) -> httpx.Response:
    return await world.http.post(path, json={"model": "r", "query": "hello", "documents": documents, **more})


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ({"query": "hello", "items": " world"}, ["hello world"]),
        ({"query": "hello ", "items": ["one", "two three"]}, ["hello one", "hello two three"]),
        ({"query": " hello", "items": ["one"], "item_first": True}, ["one hello"]),
        ({"query": [5, 6], "items": [[7], [8, 9]]}, [[5, 6, 7], [5, 6, 8, 9]]),
        ({"query": [5, 6], "items": [[7]], "item_first": True}, [[7, 5, 6]]),
    ],
)
async def test_score_of_each_item_has_its_labels_in_their_order(
    scoring: World, given: dict[str, Any], prompts: list[Any]
) -> None:
    ids = [list(tokenizers.tiny().encode(one).ids) if isinstance(one, str) else one for one in prompts]
    body = {"model": MODEL, "label_token_ids": [9, 3, 9], **given}
    answer = (await scoring.http.post("/v1/score", json=body)).json()
    assert answer["object"] == "scoring" and answer["model"] == MODEL
    for found, each in zip(answer["scores"], ids, strict=True):
        assert found == pytest.approx(expected(each, [9, 3, 9]))
    tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    sent = [running.submit for running in scoring.groups[0].requests]
    assert sorted(list(submit.token_ids) for submit in sent) == sorted(ids)
    assert all(submit.sampling.prompt_only and submit.sampling.max_new_tokens == 1 for submit in sent)
    softmax = (await scoring.http.post("/v1/score", json=body | {"apply_softmax": True})).json()["scores"]
    for found, plain in zip(softmax, answer["scores"], strict=True):
        assert found == pytest.approx([one / sum(plain) for one in plain])


WRONG_SCORES: list[tuple[dict[str, Any], str]] = [
    ({}, "query"),
    ({"query": "a"}, "items"),
    ({"query": "a", "items": []}, "items"),
    ({"query": "a", "items": ["b"] * 2049}, "items"),
    ({"query": "a", "items": [[5]]}, "items"),
    ({"query": ["a"], "items": ["b"]}, "query"),
    ({"query": "", "items": ["a", ""], "query_embed_overrides": [[0.5]]}, "query_embed_overrides"),
    ({"query": "a" * 10_000, "items": ["b"] * 2048}, "query"),
    ({"query": [5] * 10_000, "items": [[6]] * 2048}, "query"),
    ({"query": "a", "items": "b", "label_token_ids": []}, "label_token_ids"),
    ({"query": "a", "items": "b", "label_token_ids": [-1]}, "label_token_ids[0]"),
    ({"query": "a", "items": "b", "label_token_ids": [400]}, "label_token_ids"),
    ({"query": [5], "items": [[6], [7] * 512]}, "items[1]"),
    ({"query": "a", "items": "b", "model": "e"}, "model"),
]


async def test_score_impossible_parameters_are_refused_by_name(ranking: World) -> None:
    route = ranking.route(place(ranking.groups[0]))
    route.model.vocab_size = 400
    embedder = ranking.route(place(ranking.groups[0]), name="e", embedding=common_pb2.Embedding(dimensions=3))
    await ranking.publish(route, embedder)
    for body, param in WRONG_SCORES:
        answer = await ranking.http.post("/v1/score", json={"model": MODEL, "label_token_ids": [5], **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not ranking.groups[0].requests


async def test_score_that_an_engine_does_not_make_is_a_503(scoring: World) -> None:
    async def of_an_older_one(running: Running) -> None:
        running.tokens([5], finish=common_pb2.LENGTH)

    scoring.groups[0].script = of_an_older_one
    body = {"model": MODEL, "query": "a", "items": "b", "label_token_ids": [5]}
    answer = await scoring.http.post("/v1/score", json=body)
    assert answer.status_code == 503 and "no log-probabilities" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_rerank_orders_documents_by_relevance(ranking: World, path: str) -> None:
    documents = ["one two three four five", "one", {"text": "one two three"}]
    answer = (await rank(ranking, documents, path)).json()
    assert answer["object"] == "list" and answer["model"] == "r" and answer["id"].startswith("rerank-")
    texts = ["one two three four five", "one", "one two three"]
    ids = [ranking.ids(f"<hello><{text}>") for text in texts]
    scores = [relevance([-8 / (1 + len(each)), -9 / (1 + len(each))]) for each in ids]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert order == [1, 2, 0]
    for found, index in zip(answer["results"], order, strict=True):
        assert found == {
            "index": index,
            "relevance_score": pytest.approx(scores[index]),
            "document": {"text": texts[index]},
        }
    tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    sent = [running.submit for running in ranking.groups[0].requests]
    assert sorted(list(submit.token_ids) for submit in sent) == sorted(ids)
    assert all(list(submit.sampling.label_token_ids) == [8, 9] for submit in sent)


async def test_rerank_returns_as_many_documents_as_requested(ranking: World) -> None:
    documents = ["one two three four five", "one"]
    (best,) = (await rank(ranking, documents, top_n=1, return_documents=False)).json()["results"]
    assert best["index"] == 1 and "document" not in best
    assert len((await rank(ranking, documents, top_n=9)).json()["results"]) == 2


WRONG_RANKS: list[tuple[dict[str, Any], str]] = [
    ({"query": " "}, "query"),
    ({"query": [5]}, "query"),
    ({"documents": []}, "documents"),
    ({"documents": "one"}, "documents"),
    ({"documents": ["one", " "]}, "documents"),
    ({"documents": ["one", {"title": "two"}]}, "documents"),
    ({"documents": ["one"] * 2049}, "documents"),
    ({"documents": ["one", "two " * 2000]}, "documents[1]"),
    ({"query": "a" * 10_000, "documents": ["b"] * 2048}, "query"),
    ({"instruct": "a" * 10_000, "documents": ["b"] * 2048}, "query"),
    ({"top_n": 0}, "top_n"),
    ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
    ({"model": "e"}, "model"),
    ({"model": MODEL}, "model"),
]


async def test_rerank_impossible_parameters_are_refused_by_name(ranking: World) -> None:
    for body, param in WRONG_RANKS:
        answer = await ranking.http.post("/v1/rerank", json={"model": "r", "query": "a", "documents": ["b"], **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not ranking.groups[0].requests


async def test_rerank_instruction_goes_where_the_template_wants_it(ranking: World) -> None:
    for more, said in (({}, "usual"), ({"instruct": "mine"}, "mine")):
        await rank(ranking, ["one"], model="u", **more)
        asked = f'The answer can only be "yes" or "no". {said}: hello one'
        assert list(ranking.groups[0].requests[-1].submit.token_ids) == ranking.ids(asked)


async def test_rerank_of_a_listed_model_with_a_template_for_chats_has_qwens_prompt(
    scoring: World, tmp_path: Path
) -> None:
    tokenizer = tokenizers.byte_level()
    route = scoring.route(place(scoring.groups[0]), name="q")
    route.model.path = tokenizers.write(tokenizer, tmp_path / "plain")
    route.model.reranker.SetInParent()
    await scoring.publish(route)
    refused = await rank(scoring, ["one"], model="q")
    assert refused.status_code == 400 and "<|im_start|>" in refused.json()["error"]["message"]
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["yes", "no"])
    route.model.path = tokenizers.write(tokenizer, tmp_path / "marked")
    await scoring.publish(route)
    assert (await rank(scoring, ["one"], model="q")).status_code == 200
    submit = scoring.groups[0].requests[-1].submit
    text = tokenizer.decode(submit.token_ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nJudge whether") and "<Document>: one<|im_end|>\n" in text
    assert list(submit.sampling.label_token_ids) == [tokenizer.token_to_id("yes"), tokenizer.token_to_id("no")]


async def test_rerank_by_a_cross_encoder_is_of_pairs_and_the_model_makes_nothing_else(scoring: World) -> None:
    async def compare(running: Running) -> None:
        assert running.submit.embed
        running.tokens((), embedding=[len(running.submit.token_ids) - 5.0], finish=common_pb2.STOP)

    route = scoring.route(place(scoring.groups[0]), name="c", embedding=common_pb2.Embedding(dimensions=1))
    route.model.embedding.pooling = "pair"
    route.model.reranker.SetInParent()
    await scoring.publish(route)
    scoring.groups[0].script = compare
    documents = ["one", "one two three four"]
    results = (await rank(scoring, documents, model="c")).json()["results"]
    pairs = [list(tokenizers.tiny().encode("hello", one).ids) for one in documents]
    assert [list(one.submit.token_ids) for one in scoring.groups[0].requests] == pairs
    found = {one["index"]: one["relevance_score"] for one in results}
    assert found == pytest.approx({n: 1 / (1 + exp(5 - len(pair))) for n, pair in enumerate(pairs)})
    assert (await rank(scoring, ["one"], model="c", instruct="a")).json()["error"]["param"] == "instruct"
    for path, body in (
        ("embeddings", {"input": "a"}),
        ("completions", {"prompt": "a"}),
        ("score", {"query": "a", "items": "b", "label_token_ids": [5]}),
    ):
        answer = await scoring.http.post(f"/v1/{path}", json={"model": "c", **body})
        assert answer.status_code == 400 and "ask /v1/rerank" in answer.json()["error"]["message"]


async def test_rerank_of_many_documents_has_only_some_in_flight_and_ends_with_its_client(ranking: World) -> None:
    async def held(running: Running) -> None:
        await running.cancelled.wait()

    group = ranking.groups[0]
    group.script = held
    asked = asyncio.get_running_loop().create_task(rank(ranking, ["one"] * 1500))
    await group.arrived(MOST_AT_ONCE)
    asked.cancel()
    for running in group.requests:
        await running.cancelled.wait()
    assert len(group.requests) == MOST_AT_ONCE


def test_probabilities_of_impossible_tokens_are_zero() -> None:
    nothing = float("-inf")
    assert probabilities([nothing, 0.0], among_themselves=False) == [0.0, 1.0]
    assert relevance([nothing, nothing]) == 0.0 and relevance([log(3), 0.0]) == pytest.approx(0.75)
