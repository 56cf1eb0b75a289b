"""Reasoning of a model that thinks, over HTTP: split off, streamed, counted, switched off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from tests.gateway import fakes, tokenizers
from tests.gateway.conftest import MODEL, World
from tests.gateway.parsing.test_parsers import THINKS


async def test_reasoning_of_a_chat_is_split_off_streamed_and_counted(world: World, tmp_path: Path) -> None:
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "thinks", THINKS)
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    ids = world.say("<think>one two</think>three")
    thought = len(world.ids("<think>one two</think>"))

    body = (await world.chat()).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("one two", "three")
    counted = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert body["usage"]["completion_tokens"] == len(ids) and 0 < counted < len(ids)

    reasoning = text = ""
    async for chunk in await world.openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            more = getattr(choice.delta, "reasoning_content", None) or ""
            assert not (more and text), "reasoning comes before the answer"
            reasoning, text = reasoning + more, text + (choice.delta.content or "")
        if chunk.usage is not None:
            assert chunk.usage.completion_tokens_details is not None
            streamed = chunk.usage.completion_tokens_details.reasoning_tokens
    assert (reasoning, text) == ("one two", "three")
    assert streamed is not None and 0 < streamed <= thought

    together = (await world.chat(separate_reasoning=False)).json()["choices"][0]["message"]
    assert together["content"] == "<think>one two</think>three" and "reasoning_content" not in together
    plain = (await world.complete(max_tokens=64)).json()["choices"][0]
    assert plain["text"] == "<think>one two</think>three", "a completion is not taken apart"

    world.say("three")
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
        answered = (await world.chat(**off)).json()["choices"][0]["message"]
        assert (answered["content"], answered.get("reasoning_content")) == ("three", None)
        prompt = world.groups[0].requests[-1].submit.token_ids
        assert tokenizers.tiny().decode(list(prompt), skip_special_tokens=False).endswith("<think>\n\n</think>\n\n")


async def test_grammar_of_a_chat_applies_after_the_reasoning_unless_thinking_is_off(
    world: World, tmp_path: Path
) -> None:
    folder = tokenizers.write(tokenizers.tiny(), tmp_path / "thinks", THINKS)
    await world.publish(fakes.route(MODEL, folder, fakes.place(world.groups[0])))
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 120}}}

    async def sent(**more: Any) -> common_pb2.Sampling:
        assert (await world.chat(**more)).status_code == 200
        return world.groups[0].requests[-1].submit.sampling

    world.say("<think>one two</think>120")
    message = (await world.chat(response_format=form)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("one two", "120")
    tagged = json.loads((await sent(response_format=form)).structural_tag)["format"]["elements"]
    assert tagged[0] == {
        "type": "optional",
        "content": {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
    }
    together = await sent(response_format=form, separate_reasoning=False)
    assert json.loads(together.structural_tag)["format"]["elements"] == tagged
    assert (await sent(regex="[ab]")).structural_tag.endswith('{"type": "regex", "pattern": "[ab]"}]}}')
    assert (await sent()).WhichOneof("grammar") is None

    world.say("120")
    named = {"chat_template_kwargs": {"thinking": False}}
    for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}, named):
        assert (await sent(response_format=form, **off)).ebnf == tagged[1]["grammar"]


@pytest.mark.parametrize("parser", ["none", "qwen3"])
async def test_reasoning_parser_of_the_catalogue_goes_before_the_template(world: World, parser: str) -> None:
    route = world.route(fakes.place(world.groups[0]))
    route.model.reasoning_parser = parser
    await world.publish(route)
    world.say("<think>one</think>two")
    message = (await world.chat()).json()["choices"][0]["message"]
    expected = ("<think>one</think>two", None) if parser == "none" else ("two", "one")
    assert (message["content"], message.get("reasoning_content")) == expected
