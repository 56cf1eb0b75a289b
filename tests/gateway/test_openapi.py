"""What /openapi.json says of the paths and bodies is what the gateway takes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gateway import openapi
from gateway.app import build
from gateway.errors import BadField
from gateway.openai.bodies import parse
from tests.gateway.conftest import World

KINDS = {kind.__name__: kind for kind in openapi.REQUESTS}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "x"},
]
MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
FORM: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": {}}
SCORE: dict[str, Any] = {"model": "m", "query": "a", "items": ["b", "c"], "label_token_ids": [1, 2]}
RERANK: dict[str, Any] = {"model": "m", "query": "a", "documents": ["b", {"text": "c"}]}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def fits(kind: str, body: Any) -> bool:
    told = openapi.document()
    checker = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{kind}", **told})
    return bool(checker.is_valid(body))


def taken(kind: str, body: Any) -> bool:
    try:
        parse(KINDS[kind], json.dumps(body).encode())
    except BadField:
        return False
    return True


@pytest.mark.parametrize(
    ("kind", "body", "right"),
    [
        ("ChatRequest", CHAT, True),
        ("ChatRequest", {**CHAT, "stop": ["a", "b"], "n": 2, "unknown": 1}, True),
        ("ChatRequest", {**CHAT, "messages": []}, False),
        ("ChatRequest", {**CHAT, "stop": [""]}, False),
        ("ChatRequest", {**CHAT, "max_tokens": 1 << 63}, False),
        ("ChatRequest", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        ("ChatRequest", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, False),
        ("CompletionRequest", {"model": "m", "prompt": [[1, 2], [3]]}, True),
        ("CompletionRequest", {"model": "m", "prompt": [[1, 2], []]}, False),
        ("CompletionRequest", {"model": "m", "prompt": "a", "stop_token_ids": [-1]}, False),
        ("ResponsesRequest", {"model": "m", "input": "x", "unknown": 1, "text": {"format": FORM}}, True),
        ("ResponsesRequest", {"model": "m", "input": ITEMS, "tools": [{"type": "function", "name": "f"}]}, True),
        ("ResponsesRequest", {"model": "m", "input": []}, False),
        ("ResponsesRequest", {"model": "m", "input": [{"role": "robot", "content": "x"}]}, False),
        ("ResponsesRequest", {"model": "m", "input": [{"type": "item_reference", "id": "x"}]}, False),
        ("ResponsesRequest", {"model": "m", "input": "x", "tools": [{"type": "web_search"}]}, False),
        ("ResponsesRequest", {"model": "m", "input": "x", "tool_choice": {"type": "mcp"}}, False),
        ("ResponsesRequest", {"model": "m", "input": "x", "text": {"format": {"type": "json_schema"}}}, False),
        ("EmbeddingRequest", {"model": "m", "input": [[1, 2], [3]], "dimensions": 2}, True),
        ("EmbeddingRequest", {"model": "m", "input": ["a"] * 2049}, False),
        ("EmbeddingRequest", {"model": "m", "input": [], "encoding_format": "base64"}, False),
        ("EmbeddingRequest", {"model": "m", "input": "a", "encoding_format": "int8"}, False),
        ("ScoreRequest", {**SCORE, "query": [1], "items": [[1, 2], [3]]}, True),
        ("ScoreRequest", {**SCORE, "items": []}, False),
        ("ScoreRequest", {**SCORE, "query": ["a"]}, False),
        ("ScoreRequest", {**SCORE, "label_token_ids": [-1]}, False),
        ("RerankRequest", {**RERANK, "top_n": 1, "return_documents": False, "unknown": 1}, True),
        ("RerankRequest", {**RERANK, "documents": ["a", " "]}, False),
        ("RerankRequest", {**RERANK, "documents": []}, False),
        ("RerankRequest", {**RERANK, "query": " "}, False),
        ("RerankRequest", {**RERANK, "top_n": 0}, False),
        ("TokenizeRequest", {"model": "m", "messages": []}, False),
        ("DetokenizeRequest", {"model": "m", "tokens": [1 << 32]}, False),
        ("MessagesRequest", MESSAGES, True),
        ("MessagesRequest", MESSAGES | {"system": [{"type": "text", "text": "x"}], "stop_sequences": ["x"]}, True),
        ("MessagesRequest", MESSAGES | {"max_tokens": 0}, False),
        ("MessagesRequest", MESSAGES | {"temperature": 1.5}, False),
        ("MessagesRequest", MESSAGES | {"messages": [{"role": "tool", "content": "x"}]}, False),
        ("CountRequest", {key: MESSAGES[key] for key in ("model", "messages")}, True),
        ("CountRequest", MESSAGES | {"messages": []}, False),
        ("ModelEntry", {"name": "m", "path": "/m", "aliases": ["n"], "devices": 2, "quota_bytes": None}, True),
        ("ModelEntry", {"name": "m", "path": "/m", "devices": 3}, False),
        ("ModelEntry", {"name": "m", "path": "/m", "unknown": 1}, False),
        ("ModelEntry", {"name": "m"}, False),
    ],
)
def test_openapi_body_is_accepted_exactly_if_the_description_allows_it(kind: str, body: Any, right: bool) -> None:
    assert (fits(kind, body), taken(kind, body)) == (right, right)


async def test_openapi_paths_are_exactly_those_that_are_served(world: World) -> None:
    told = (await world.http.get("/openapi.json")).json()
    assert told == json.loads(json.dumps(openapi.document()))
    for path, methods in told["paths"].items():
        for method, described in methods.items():
            answer = await world.http.request(method, path.replace("{model}", "org/tiny"), content=b"{}")
            usual = 400 if method == "post" else 200
            assert answer.status_code == (403 if "admin" in described.get("tags", ()) else usual), path
    assert set(told["paths"]) == {path for path in served() if path != "/openapi.json"}


def served() -> set[str]:
    """The paths that the application knows."""
    found: set[str] = set()

    class Routes(Exception):
        pass

    def kept(routes: Any, exception_handlers: Any) -> None:
        found.update(route.path.replace(":path", "") for route in routes)
        raise Routes

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Routes):
        patch.setattr("gateway.app.Starlette", kept)
        build(None, None, None, placement=object())  # type: ignore[arg-type]
    return found
