"""/openapi.json: the HTTP API described for programs, made of the same models that check its requests.

The description of a request is exact except for fields that Prism refuses or ignores by name
(`gateway/openai/bodies.py`); those are allowed by the description, as OpenAI's clients send them.
"""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema

from gateway.admin.bodies import (
    ModelEntry,
    MoveParameters,
    RemovalParameters,
    ReplicaParameters,
    SleepParameters,
    WaitParameters,
)
from gateway.anthropic.bodies import CountRequest, MessagesRequest
from gateway.openai.bodies import (
    MOST_PROMPTS,
    MOST_STOPS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from gateway.openai.embeddings import MOST_INPUTS, EmbeddingRequest
from gateway.openai.responses_bodies import ResponsesRequest
from gateway.openai.scoring import MOST_ITEMS, RerankEndpoint, RerankRequest, ScoreRequest

Json = dict[str, Any]
_TOKEN: Json = {"type": "integer", "minimum": 0, "exclusiveMaximum": 1 << 63}
_TOKENS: Json = {"type": "array", "minItems": 1, "items": _TOKEN}
_TEXT_PART: Json = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}


def _prompts(most: int) -> Json:
    """The schema of what `bodies.prompts` takes."""
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "maxItems": most, "items": {"type": "string"}},
            _TOKENS,
            {"type": "array", "minItems": 1, "maxItems": most, "items": _TOKENS},
        ]
    }


def _object(**properties: Json) -> Json:
    return {"type": "object", "required": list(properties), "properties": properties}


_STOP: Json = {"type": "string", "minLength": 1}
_WRITTEN: Json = {"type": "string", "pattern": r"\S"}
_BY_HAND: dict[str, Json] = {
    # Fields that plain functions check, of which pydantic's schema says nothing.
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOPS}, {"type": "null"}]},
    "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}]},
    "prompt": _prompts(MOST_PROMPTS),
    "input": _prompts(MOST_INPUTS),
    "query": {"anyOf": [{"type": "string"}, _TOKENS]},
    "items": _prompts(MOST_ITEMS),
    "documents": {
        "type": "array",
        "minItems": 1,
        "maxItems": MOST_ITEMS,
        "items": {"anyOf": [_WRITTEN, _object(text=_WRITTEN)]},
    },
}
_NAME = "#/components/schemas/{model}"
_HEADERS: list[Json] = [
    {"name": "x-request-id", "in": "header", "schema": {"type": "string"}},
    *(
        {"name": name, "in": "header", "schema": {"type": "integer", "minimum": 1, "exclusiveMaximum": 10**9}}
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms")
    ),
    {"name": "x-priority", "in": "header", "schema": {"type": "string", "enum": ["", "interactive", "batch"]}},
    {"name": "x-slo-drop", "in": "header", "schema": {"type": "string", "enum": ["", "late"]}},
]
_ERROR: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_CARD: Json = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "root": {"type": "string"},
        "parent": {"type": ["string", "null"]},
        "aliases": {"type": "array", "items": {"type": "string"}},
        "max_model_len": {"type": "integer"},
        "residency": {"type": "string"},
        "task": {"enum": ["generate", "embed", "rerank"]},
        "image_pinned": {"type": "boolean"},
        "groups": {"type": "array", "items": {"type": "string"}},
        "error": {"type": ["string", "null"]},
        "quantisation": {"type": ["string", "null"]},
        "unverified": {"type": "boolean"},
    },
}
_USAGE: Json = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "additionalProperties": True,
}
_BODY_REFUSED = (400, 404, 408, 413, 415, 429, 503, 504)
_ANY_REFUSED = (401, 403)
_STEER_REFUSED = (400, 404, 409, 503, 504)
_MODEL: Json = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _answer(kind: str, choice: str) -> Json:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices", "usage"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["index", choice]}},
            "usage": _USAGE,
        },
    }


_VECTOR = _object(
    object={"const": "embedding"},
    index={"type": "integer"},
    embedding={"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "string", "format": "byte"}]},
)
_COUNTED = _object(prompt_tokens={"type": "integer"}, total_tokens={"type": "integer"})
_RANKED: Json = {
    "type": "object",
    "required": ["index", "relevance_score"],
    "properties": {
        "index": {"type": "integer"},
        "relevance_score": {"type": "number", "minimum": 0, "maximum": 1},
        "document": _object(text={"type": "string"}),
    },
}
_ANSWERS: dict[str, Json] = {
    "ChatAnswer": _answer("chat.completion", "message"),
    "CompletionAnswer": _answer("text_completion", "text"),
    "Response": _object(
        id={"type": "string"},
        object={"const": "response"},
        created_at={"type": "integer"},
        status={"enum": ["completed", "incomplete"]},
        model={"type": "string"},
        output={"type": "array", "minItems": 1, "items": {"type": "object", "required": ["id", "type"]}},
        usage={"type": "object", "required": ["input_tokens", "output_tokens", "total_tokens"]},
    ),
    "Embeddings": _object(
        object={"const": "list"},
        data={"type": "array", "minItems": 1, "items": _VECTOR},
        model={"type": "string"},
        usage=_COUNTED,
    ),
    "Scores": _object(
        object={"const": "scoring"},
        scores={"type": "array", "minItems": 1, "items": {"type": "array", "items": {"type": "number"}}},
        model={"type": "string"},
        usage=_COUNTED,
    ),
    "Ranks": _object(
        id={"type": "string"},
        object={"const": "list"},
        model={"type": "string"},
        results={"type": "array", "minItems": 1, "items": _RANKED},
        usage=_COUNTED,
    ),
    "Card": _CARD,
    "Cards": _object(object={"const": "list"}, data={"type": "array", "items": _CARD}),
    "Named": _object(id={"type": "string"}, object={"const": "model"}),
    "Deleted": _object(id={"type": "string"}, object={"const": "model"}, deleted={"const": True}),
    "Tokens": _object(
        tokens={"type": "array", "items": {"type": "integer"}},
        token_strs={"type": ["array", "null"], "items": {"type": "string"}},
        count={"type": "integer"},
        max_model_len={"type": "integer"},
    ),
    "Text": _object(prompt={"type": "string"}),
    "Health": _object(status={"type": "string"}),
    "Error": _ERROR,
    "Message": _object(
        id={"type": "string"},
        type={"const": "message"},
        role={"const": "assistant"},
        model={"type": "string"},
        content={"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type"]}},
        stop_reason={"type": "string"},
        stop_sequence={"type": ["string", "null"]},
        usage={"type": "object", "required": ["input_tokens", "output_tokens"]},
    ),
    "TokenCount": _object(input_tokens={"type": "integer"}),
    "Refusal": _object(type={"const": "error"}, error=_object(type={"type": "string"}, message={"type": "string"})),
}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": _NAME.format(model=schema)}}}


def _refusals(*statuses: int, schema: str = "Error") -> Json:
    return {str(status): {"description": "refused", "content": _json(schema)} for status in statuses}


def _post(
    summary: str,
    body: str,
    answer: str,
    stream: bool = False,
    parameters: list[Json] | None = None,
    refusal: str = "Error",
) -> Json:
    content = _json(answer)
    if stream:
        content |= {"text/event-stream": {}}
    return {
        "post": {
            "summary": summary,
            "parameters": parameters or [],
            "requestBody": {"required": True, "content": _json(body)},
            "responses": {
                "200": {"description": "the answer", "content": content},
                **_refusals(*_ANY_REFUSED, *_BODY_REFUSED, schema=refusal),
            },
        }
    }


def _get(summary: str, answer: str, *refusals: int, parameters: list[Json] | None = None, plain: bool = False) -> Json:
    content = {"text/plain": {"schema": {"type": "string"}}} if plain else _json(answer)
    return {
        "get": {
            "summary": summary,
            "parameters": parameters or [],
            "responses": {"200": {"description": "the answer", "content": content}, **_refusals(*refusals)},
        }
    }


def _steer(summary: str, kind: type[pydantic.BaseModel], answer: str = "Card") -> Json:
    """What is done to one model with an admin's key; the parameters are those of `kind`."""
    described = kind.model_json_schema()
    needed = described.get("required", ())
    parameters = [
        {"name": name, "in": "query", "required": name in needed, "schema": schema}
        for name, schema in described["properties"].items()
    ]
    return {
        "summary": summary,
        "tags": ["admin"],
        "parameters": [_MODEL, *parameters],
        "responses": {
            "200": {"description": "done", "content": _json(answer)},
            "202": {"description": "under way; Location says where its state can be seen", "content": _json("Named")},
            **_refusals(*_ANY_REFUSED, *_STEER_REFUSED),
        },
    }


def _adding() -> Json:
    return {
        "summary": "Adds a model, or reads the files of one afresh",
        "tags": ["admin"],
        "requestBody": {"required": True, "content": _json("ModelEntry")},
        "responses": {
            "200": {"description": "added", "content": _json("Card")},
            "202": {"description": "under way; Location says where its state can be seen", "content": _json("Named")},
            **_refusals(*_ANY_REFUSED, *_STEER_REFUSED, 408, 413, 415),
        },
    }


REQUESTS: tuple[type[pydantic.BaseModel], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    EmbeddingRequest,
    ScoreRequest,
    RerankRequest,
    TokenizeRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountRequest,
    ModelEntry,
)
"""Bodies of requests that the document describes, as they are checked."""


def document() -> Json:
    """The OpenAPI 3.1 document of all paths but the page's."""
    _, found = models_json_schema([(kind, "validation") for kind in REQUESTS], ref_template=_NAME)
    schemas: Json = {**found["$defs"], **_ANSWERS}
    for schema in schemas.values():
        for field, said in schema.get("properties", {}).items():
            if field in _BY_HAND and not said.keys() & {"type", "anyOf", "oneOf"}:
                said.update(_BY_HAND[field])
    health = _get("Whether it serves", "Health")
    health["get"]["responses"]["503"] = {"description": "not now", "content": _json("Health")}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Prism", "version": "1"},
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
        "paths": {
            "/v1/chat/completions": _post("Chat", "ChatRequest", "ChatAnswer", True, _HEADERS),
            "/v1/completions": _post("Completion", "CompletionRequest", "CompletionAnswer", True, _HEADERS),
            "/v1/responses": _post("Response", "ResponsesRequest", "Response", True, _HEADERS),
            "/v1/embeddings": _post("Embeddings", "EmbeddingRequest", "Embeddings", parameters=_HEADERS),
            "/v1/score": _post("Probabilities of tokens", "ScoreRequest", "Scores", parameters=_HEADERS),
            **{
                path: _post("Documents by relevance", "RerankRequest", "Ranks", parameters=_HEADERS)
                for path in (RerankEndpoint.path, *RerankEndpoint.others)
            },
            "/v1/messages": _post("Anthropic's Messages", "MessagesRequest", "Message", True, _HEADERS, "Refusal"),
            "/v1/messages/count_tokens": _post(
                "Tokens of a message's prompt", "CountRequest", "TokenCount", refusal="Refusal"
            ),
            "/v1/models": _get("All models that the key may use", "Cards", *_ANY_REFUSED) | {"post": _adding()},
            "/v1/models/{model}": _get("One of them", "Card", *_ANY_REFUSED, 404, parameters=[_MODEL])
            | {"delete": _steer("Removes a model", RemovalParameters, "Deleted")},
            "/v1/models/{model}/wake": {"post": _steer("Brings a model up", WaitParameters)},
            "/v1/models/{model}/sleep": {"post": _steer("Brings a model down", SleepParameters)},
            "/v1/models/{model}/move": {"post": _steer("Moves a model to another group", MoveParameters)},
            "/v1/models/{model}/replicate": {
                "post": _steer("Brings a model up on one group more, beside those that serve it", ReplicaParameters)
            },
            "/v1/models/{model}/pin": {"post": _steer("Keeps a model's image in host memory", WaitParameters)},
            "/v1/models/{model}/unpin": {"post": _steer("Takes a pin back", WaitParameters)},
            "/tokenize": _post("Tokens of a prompt", "TokenizeRequest", "Tokens"),
            "/detokenize": _post("Text of tokens", "DetokenizeRequest", "Text"),
            "/health": health,
            "/metrics": _get("Prometheus text", "", *_ANY_REFUSED, plain=True),
        },
    }
