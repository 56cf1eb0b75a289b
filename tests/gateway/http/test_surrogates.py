"""Halves of characters in JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BadField
from gateway.http import surrogates
from gateway.openai import bodies
from gateway.openai.bodies import DetokenizeRequest, TokenizeRequest
from gateway.tools import request as calling
from protos import common_pb2
from tests.gateway import fakes
from tests.gateway.conftest import MODEL, World
from tests.gateway.test_app import refusal

ANY = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
HALVES = [chr(code) for code in (0xD800, 0xD83D, 0xDBFF, 0xDC00, 0xDE00, 0xDFFF)]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), ANY),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(ANY, inner, max_size=3)),
    max_leaves=8,
)


def without_halves(value: Any) -> Any:
    if isinstance(value, str):
        joined = value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
        return "".join("\ufffd" if 0xD800 <= ord(one) < 0xE000 else one for one in joined)
    if isinstance(value, dict):
        return {without_halves(key): without_halves(each) for key, each in value.items()}
    return [without_halves(each) for each in value] if isinstance(value, list) else value


PIECES = st.lists(st.sampled_from([*HALVES, "\\", "u", "d83d", '"']), max_size=8).map("".join)


@given(st.one_of(VALUES, PIECES))
def test_surrogates_mended_body_differs_only_in_its_surrogates(value: Any) -> None:
    said = json.dumps(value).encode()
    mended = surrogates.mended(said)
    wanted = without_halves(json.loads(said))
    if mended is None:
        assert json.loads(said) == wanted, "there was nothing to mend"
    else:
        assert json.loads(mended.decode("utf-8")) == wanted


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\uD83Dx", "\ufffdx"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\ud83d😀", "\ufffd😀"),
        (r"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (r"\ud83d\ude00", "😀"),
        (r"\\ud83d", "\\ud83d"),
    ],
)
def test_body_with_a_lone_surrogate_is_accepted(written: str, text: str) -> None:
    asked = bodies.parse(TokenizeRequest, b'{"model": "a", "prompt": "%s", "\\udc00": 1}' % written.encode())
    assert asked.prompt == text


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model": "a", "prompt": "\ud83d"',
        rb'{"model": "a", "prompt": "\ud83g"}',
        rb'{"model": "a", "prompt": "\ud83d", "x": NaN}',
        rb'{"model": "a", "prompt": "\ud83d", "x": ' + b"[" * 100_000,
        b'{"model": "a", "prompt": "\xed\xa0\xbd\\ud83d"}',
        r'{"model": "a", "prompt": "\ud83d"}'.encode("utf-16"),
    ],
)
def test_surrogates_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadField, match="not JSON"):
        bodies.parse(TokenizeRequest, body)


def test_invalid_field_beside_a_lone_surrogate_is_named() -> None:
    with pytest.raises(BadField) as refused:
        bodies.parse(DetokenizeRequest, rb'{"model": "\ud83d", "tokens": ["a"]}')
    assert refused.value.field == "tokens[0]"


async def test_lone_surrogate_reaches_the_model_as_the_replacement_character(world: World) -> None:
    world.say("one")
    turn = '{"role": "user", "content": "aHALF"}'
    call = r'{"function": {"name": "f", "arguments": "{\"a\": \"\\ud83d\"}"}}'
    for path, body in (
        ("/v1/chat/completions", f'"messages": [{turn}]'),
        ("/v1/chat/completions", f'"messages": [{{"role": "assistant", "tool_calls": [{call}]}}, {turn}]'),
        ("/v1/completions", '"prompt": "aHALF", "stop": ["HALF"]'),
        ("/v1/completions", '"prompt": ["HALF"]'),
    ):
        for half in (r"\ud83d", r"\ufffd"):
            data = f'{{"model": "{MODEL}", {body}}}'.replace("HALF", half)
            answer = await world.http.post(path, content=data)
            assert answer.status_code == 200, answer.text
        first, second = (list(request.submit.token_ids) for request in world.groups[0].requests[-2:])
        assert first == second
    for body in ('"prompt": "aHALF"', f'"messages": [{turn}]'):
        data = f'{{"model": "{MODEL}", {body}}}'.replace("HALF", r"\ud83d")
        assert (await world.http.post("/tokenize", content=data)).json()["count"]
    unknown = await world.http.post("/v1/completions", content=rb'{"model": "\ud83d", "prompt": "a"}')
    assert refusal(unknown, 404)["message"] == "The model '\ufffd' does not exist."


async def test_embeddings_body_with_a_lone_surrogate_is_accepted(world: World) -> None:
    made = common_pb2.Embedding(dimensions=2)
    await world.publish(world.route(fakes.place(world.groups[0]), embedding=made))

    async def embeds(running: fakes.Running) -> None:
        running.tokens((), embedding=[1.0, 0.0], finish=common_pb2.STOP)

    world.groups[0].script = embeds
    body = b'{"model": "%s", "input": "\\udc00"}' % MODEL.encode()
    assert (await world.http.post("/v1/embeddings", content=body)).status_code == 200


def test_lone_surrogates_in_arguments_of_tool_calls_are_replaced() -> None:
    call = {"function": {"name": "f", "arguments": r'{"a": "\ud83d", "b": "\ud83d\ude00"}'}}
    (told,) = calling.for_template({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert told["function"]["arguments"] == {"a": "\ufffd", "b": "😀"}
