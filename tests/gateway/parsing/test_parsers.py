"""SGLang's parsers in their process: chosen by the chat template, fed piece by piece, and lost meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.parsing.parsers import NONE, NOTHING, Parsers, Parts, Splitter, Wanted
from gateway.parsing.process import ParserProcess
from gateway.tools.formats import Call, joined
from gateway.tools.request import Tool, Tools
from services.errors import Unavailable
from tests.gateway import tokenizers
from tokenization.loading import load
from tokenization.tokenizer import Tokenizer

package = pytest.mark.asyncio(loop_scope="package")
THINKS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|assistant|>' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
CODER = THINKS + "{% if tools %}{{ tools | tojson }}<function= <parameter={% endif %}"
LARGE = {"type": "integer", "maximum": 10**30}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {"n": LARGE}}}}
TOOLS = Tools([Tool.model_validate(TOOL)], must=False)


def tokenizer_of(template: str, folder: Path) -> Tokenizer:
    return load(tokenizers.write(tokenizers.tiny(), folder, template))


async def pushed(splitter: Splitter | None, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """(reasoning, text, calls) of an answer that came in these pieces."""
    if splitter is None:  # there is nothing to take apart
        return "", "".join(pieces), []
    parts: list[Parts] = [await splitter.push(piece, end=False) for piece in pieces]
    parts.append(await splitter.push("", end=True))
    splitter.close()
    calls = joined(call for part in parts for call in part.calls)
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.text for part in parts),
        [(call.name, call.arguments) for call in calls],
    )


@package
async def test_parsers_of_a_template_are_those_that_sglang_finds(parsers: Parsers, tmp_path: Path) -> None:
    plain, thinks = (
        tokenizer_of(text, tmp_path / name) for name, text in (("plain", tokenizers.TEMPLATE), ("thinks", THINKS))
    )
    assert await parsers.wanted(plain) == NOTHING
    assert await parsers.wanted(thinks) == Wanted("qwen3", "qwen", "<think>", "</think>", "</think>")
    assert (await parsers.wanted(thinks, NONE)).reasoning == ""
    stated = await parsers.wanted(plain, "deepseek-r1", "pythonic", calls=True)
    assert (stated.reasoning, stated.tools) == ("deepseek-r1", "pythonic")


@package
async def test_parser_that_sglang_does_not_have_is_refused_with_those_that_it_has(
    parsers: Parsers, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match="no parser 'nonsense' for reasoning; it has: .*qwen3"):
        await parsers.wanted(tokenizer_of(THINKS, tmp_path), "nonsense")


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("reasoning", "answer", "expected"),
    [
        ("qwen3", "<think>is it two?</think>Two.", ("is it two?", "Two.")),
        ("qwen3", "Two <b>.", ("", "Two <b>.")),
        ("deepseek-r1", "is it two?</think>Two.", ("is it two?", "Two.")),
        ("qwen3", "<think>cut", ("cut", "")),
        ("qwen3", "<think>cut</thi", ("cut</thi", "")),
        ("deepseek-r1", "so</think>a <", ("so", "a <")),
    ],
)
@package
async def test_reasoning_is_split_off_however_the_answer_is_cut(
    parsers: Parsers, tmp_path: Path, reasoning: str, answer: str, expected: tuple[str, str], step: int
) -> None:
    tokenizer = tokenizer_of(THINKS, tmp_path)
    wanted = await parsers.wanted(tokenizer, reasoning)
    splitter = parsers.splitter(wanted, tokenizer, [], None)
    pieces = [answer[at : at + step] for at in range(0, len(answer), step)]
    assert (await pushed(splitter, pieces))[:2] == expected
    whole = parsers.splitter(wanted, tokenizer, [], None, whole=True)
    assert (await pushed(whole, pieces))[:2] == expected


@pytest.mark.parametrize("whole", [False, True])
@package
async def test_calls_are_found_in_a_format_that_only_sglang_knows(
    parsers: Parsers, tmp_path: Path, whole: bool
) -> None:
    tokenizer = tokenizer_of(CODER, tmp_path)
    wanted = await parsers.wanted(tokenizer, calls=True)
    assert wanted.tools == "qwen3_coder"
    splitter = parsers.splitter(wanted, tokenizer, [], TOOLS, whole=whole)
    called = "<tool_call>\n<function=now>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>"
    thought, text, calls = await pushed(splitter, ["<think>hm</think>", "Let me see. ", *called])
    assert (thought, text.strip()) == ("hm", "Let me see.")
    assert calls == [("now", '{"zone": "UTC"}')]


@pytest.mark.parametrize(
    ("prompt", "answer", "expected"),
    [
        ("<|assistant|><think>\n", "hm</think>Two.", ("hm", "Two.")),
        ("<|assistant|><think>\n\n</think>\n\n", "Two.", ("", "Two.")),
    ],
)
@package
async def test_answer_to_a_prompt_that_ends_within_reasoning_begins_within_it(
    parsers: Parsers, tmp_path: Path, prompt: str, answer: str, expected: tuple[str, str]
) -> None:
    tokenizer = tokenizer_of(THINKS, tmp_path)
    for reasoning in ("qwen3", "deepseek-r1"):
        wanted = await parsers.wanted(tokenizer, reasoning)
        splitter = parsers.splitter(wanted, tokenizer, tokenizer.encode(prompt, special=False), None)
        assert (await pushed(splitter, [answer]))[:2] == expected, reasoning


@package
async def test_answer_whose_process_is_killed_goes_on_in_another(tmp_path: Path) -> None:
    parsers = Parsers()
    try:
        tokenizer = tokenizer_of(THINKS, tmp_path)
        splitter = parsers.splitter(await parsers.wanted(tokenizer), tokenizer, [], None)
        assert splitter is not None
        first = await splitter.push("<think>is it", end=False)
        os.kill((await parsers.process.ready()).pid, signal.SIGKILL)
        second = await splitter.push(" two?</think>Tw", end=False)
        last = await splitter.push("o.", end=True)
        assert (first.reasoning, second.reasoning, second.text + last.text) == ("is it", " two?", "Two.")
    finally:
        await parsers.close()


@package
async def test_process_that_cannot_be_started_makes_answers_unavailable(tmp_path: Path) -> None:
    parsers = Parsers(("false",))
    tokenizer = tokenizer_of("{{ tools }}" + tokenizers.TEMPLATE, tmp_path / "plain")
    assert await parsers.wanted(tokenizer) == NOTHING, "requests without tools need no process"
    assert parsers.splitter(NOTHING, tokenizer, [], None) is None
    with pytest.raises(Unavailable, match="cannot be started"):
        await parsers.wanted(tokenizer_of(THINKS, tmp_path))
    await parsers.close()


@package
async def test_closed_process_is_not_started_again() -> None:
    process = ParserProcess()
    await process.close()
    with pytest.raises(Unavailable, match="stopping"):
        await process.ready()


@package
async def test_parser_that_fails_leaves_the_rest_of_the_answer_as_text(parsers: Parsers) -> None:
    broken: list[Any] = ["qwen3", None, [{"type": "function"}], "qwen", False]
    splitter = Splitter(parsers.process, 1 << 40, broken, (), whole=False)
    assert await pushed(splitter, ["<think>a", "</think>b"]) == ("", "<think>a</think>b", [])


def test_parts_of_calls_are_joined_by_their_number() -> None:
    parts = Parts()
    assert joined(parts.calls) == []
    calls = [Call("1", "f", "{}"), Call("2", "g", '{"a": 1}')]
    split = [piece for number, call in enumerate(calls) for piece in (call.part(number),)]
    assert joined(split) == calls
