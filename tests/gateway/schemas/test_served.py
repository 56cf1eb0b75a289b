"""Schemas as clients' libraries make them: all are served, and what is answered is read by the library that asked."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import random
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import BaseModel, ConfigDict, Field

from gateway.schemas import grammar
from testing.schemas.answers import Compiled, Judge, strict

pytestmark = pytest.mark.sglang


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(9, ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str = Field(min_length=1, max_length=40, pattern="^[A-Z]")


class Node(BaseModel):
    """Refers to itself."""

    value: int
    children: list[Node] = []
    parent: Node | None = None


class Numbers(BaseModel):
    age: int = Field(ge=0, le=120)
    year: int = Field(ge=1950, le=2025)
    above: int = Field(gt=5)
    below: int = Field(le=-5)
    confidence: float = Field(ge=0, le=1)
    share: float = Field(gt=0, lt=1)
    degrees: float = Field(ge=-273.15)
    price: float = Field(multiple_of=0.5, ge=0, le=1000)
    dozens: int = Field(multiple_of=12)
    level: Level


class Texts(BaseModel):
    code: str = Field(pattern=r"^[A-Z]{2}-\d{4}$")
    name: Annotated[str, Field(min_length=1, max_length=100)]
    slug: str = Field(pattern=r"^[a-z0-9]+(?:-[a-z0-9]+)*$", max_length=20)
    when: datetime.datetime
    day: datetime.date
    hour: datetime.time | None = None
    took: datetime.timedelta | None = None
    id: uuid.UUID
    home: Annotated[pydantic.AnyUrl, pydantic.UrlConstraints(max_length=200)]
    link: pydantic.AnyUrl | None = None
    address: ipaddress.IPv4Address
    colour: Colour = Colour.RED
    secret: pydantic.SecretStr = pydantic.SecretStr("")


class Loose(BaseModel):
    """What pydantic's schemas say less of than it asks for."""

    exact: decimal.Decimal
    home: pydantic.HttpUrl


class Containers(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tags: list[str] = Field(min_length=1, max_length=3)
    pair: tuple[int, str]
    colours: set[Colour]
    scores: dict[str, float]
    by_colour: dict[Colour, int] = {}
    coded: dict[Annotated[str, Field(pattern="^[a-z]{2}$")], int] = {}
    anything: Any = None
    either: int | str | list[bool] | None = None
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pets: list[Cat | Dog] = []
    node: Node


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    title: str
    description: int | None = None


MODELS: Sequence[type[BaseModel]] = (Numbers, Texts, Containers, Open, Node, Cat, Loose)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("made", ["pydantic", "openai"])
def test_answers_to_schemas_of_pydantic_are_read_by_their_models(model: type[BaseModel], made: str) -> None:
    if made == "openai" and model in (Containers, Open):
        pytest.skip("OpenAI's client closes objects that are to be open")
    schema = model.model_json_schema() if made == "pydantic" else to_strict_json_schema(model)
    read = 0
    for answer in Compiled(grammar.of(schema)).answers(random.Random(1), 25, 1500):
        Judge(schema).validate(strict(answer))
        if model is not Loose:
            model.model_validate_json(answer)
        read += 1
    assert read >= 5


ZOD: Any = {  # z.toJSONSchema(z.strictObject({...}))
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "email": {
            "type": "string",
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
            r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        "count": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
        "positive": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "ratio": {"type": "number", "exclusiveMinimum": 0},
        "nothing": {"not": {}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
        "record": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
        "limited": {
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["a", "b"]},
            "additionalProperties": {"type": "boolean"},
            "required": ["a", "b"],
        },
        "shape": {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {
                        "kind": {"type": "string", "const": "circle"},
                        "r": {"type": "number", "minimum": 0},
                    },
                    "required": ["kind", "r"],
                    "additionalProperties": False,
                },
                {
                    "type": "object",
                    "properties": {"kind": {"type": "string", "const": "square"}, "side": {"type": "number"}},
                    "required": ["kind", "side"],
                    "additionalProperties": False,
                },
            ]
        },
        "both": {
            "allOf": [
                {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
                {"type": "object", "properties": {"y": {"type": "number"}}, "required": ["y"]},
            ]
        },
        "id": {
            "type": "string",
            "format": "uuid",
            "pattern": r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
            r"|00000000-0000-0000-0000-000000000000|ffffffff-ffff-ffff-ffff-ffffffffffff)$",
        },
        "size": {"anyOf": [{"type": "number", "const": 1}, {"type": "number", "const": 2}], "default": 1},
        "deep": {"$ref": "#/$defs/__schema0"},
    },
    "required": ["name", "email", "count", "positive", "ratio", "pair", "record", "limited", "shape", "both", "id"],
    "additionalProperties": False,
    "$defs": {
        "__schema0": {
            "type": "object",
            "properties": {"next": {"$ref": "#/$defs/__schema0"}},
            "additionalProperties": False,
        }
    },
}
LANGCHAIN: Any = {  # a tool's parameters, as convert_to_openai_tool makes them
    "properties": {
        "query": {"description": "What to look for", "type": "string"},
        "limit": {"default": 10, "type": "integer", "maximum": 50, "minimum": 1},
        "filters": {"anyOf": [{"additionalProperties": True, "type": "object"}, {"type": "null"}], "default": None},
        "sort": {"default": "newest", "enum": ["newest", "oldest"], "type": "string"},
    },
    "required": ["query"],
    "type": "object",
}
OPENAPI: Any = {  # as generators for OpenAPI 3.0 make them
    "type": "object",
    "properties": {
        "size": {"type": "number", "format": "double", "minimum": 0, "maximum": 1.7976931348623157e308},
        "rating": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 5, "nullable": True},
        "id": {"type": "integer", "format": "int64", "minimum": -9223372036854775808, "maximum": 9223372036854775807},
        "photo": {"type": "string", "format": "byte", "readOnly": True},
    },
    "required": ["size", "id"],
    "xml": {"name": "thing"},
    "example": {"size": 3},
}


@pytest.mark.parametrize("schema", [ZOD, LANGCHAIN, OPENAPI], ids=["zod", "langchain", "openapi"])
def test_grammar_of_foreign_schema_gives_valid_answers(schema: Any) -> None:
    judge, read = Judge(schema), 0
    for answer in Compiled(grammar.of(schema)).answers(random.Random(1), 25, 1500):
        judge.validate(strict(answer))
        read += 1
    assert read >= 5
