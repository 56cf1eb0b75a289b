"""Calls in the formats that are JSON, whole and in pieces: what is no call of a known tool is text."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.parsing.parsers import Parsers, Parts, Wanted
from gateway.tools.formats import joined
from gateway.tools.request import Tool, Tools
from tests.gateway import tokenizers
from tokenization.loading import load

package = pytest.mark.asyncio(loop_scope="package")
TOOLS = [Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("weather", "now")]
BERN = '{"name": "weather", "arguments": {"city": "Bern {}<", "days": [1, 2]}}'
NOW = '{"name": "now", "parameters": {}}'
UNKNOWN = '{"name": "rm", "arguments": {"name": "now", "arguments": {}}}'
WEATHER = ("weather", '{"city": "Bern {}<", "days": [1, 2]}')
CALLED = ("now", "{}")
ANSWERS = [
    # (parser, the answer, its text, its calls)
    ("hermes", f"Well.\n<tool_call>\n{BERN}\n</tool_call>", "Well.\n", [WEATHER]),
    ("qwen", f"<tool_call>{BERN}</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", "", [WEATHER, CALLED]),
    ("hermes", f"\n\n<tool_call>{BERN}", "", [WEATHER]),
    ("hermes", "a <tool b </tool_call> c", "a <tool b </tool_call> c", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arg', '<tool_call>\n{"name": "weather", "arg', []),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call> so', '<tool_call>{"name": "rm"} so', []),
    ("hermes", f"<tool_call>{UNKNOWN}</tool_call><tool_call>{NOW}", f"<tool_call>{UNKNOWN}", [CALLED]),
    ("hermes", "<tool_call>[1]", "<tool_call>[1]", []),
    ("hermes", "<tool_call>{now}{}{}", "<tool_call>{now}{}{}", []),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> so <tool_call>{"name": "now"}', " so", [CALLED, CALLED]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [CALLED]),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800é"}}', "", [("now", '{"a": "?é"}')]),
    ("mistral", f"[TOOL_CALLS][{BERN}, {NOW}]", "", [WEATHER, CALLED]),
    ("mistral", f"a[0] is: [TOOL_CALLS] [{BERN}]", "a[0] is: ", [WEATHER]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{"a": [{}]}', "", [CALLED, ("now", '{"a": [{}]}')]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("mistral", "[TOOL_CALLS]3d[ARGS]{}", "[TOOL_CALLS]3d[ARGS]{}", []),
    ("mistral", "[TOOL_CALLS]rm[ARGS]{}", "[TOOL_CALLS]rm[ARGS]{}", []),
    ("llama3", f"{BERN}; {NOW}", "", [WEATHER, CALLED]),
    ("llama3", f"\n<|python_tag|>{BERN}", "", [WEATHER]),
    ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ("llama3", "It is {\"a\": 1}, 'b': {}.", "It is {\"a\": 1}, 'b': {}.", []),
    ("llama3", "{not JSON", "{not JSON", []),
    ("enforced", f"[ {NOW} ,{BERN}]", "", [CALLED, WEATHER]),
]


@dataclass
class Found:
    text: str
    calls: list[tuple[str, str]]
    parts: list[Parts]


async def found(
    parsers: Parsers,
    folder: Path,
    parser: str,
    pieces: Sequence[str],
    *,
    whole: bool = False,
    parallel: bool = True,
    cut: bool = False,
    known: Sequence[Tool] = TOOLS,
) -> Found:
    """What is found in an answer that comes in these pieces."""
    tools = Tools(list(known), must=parser == "enforced", parallel=parallel)
    wanted = Wanted(tools="" if parser == "enforced" else parser)
    splitter = parsers.splitter(wanted, load(str(folder)), [], tools, whole=whole)
    assert splitter is not None
    parts = [await splitter.push(piece, end=False) for piece in pieces]
    parts.append(await splitter.push("", end=True, cut=cut))
    splitter.close()
    calls = joined(call for part in parts for call in part.calls)
    return Found("".join(part.text for part in parts), [(call.name, call.arguments) for call in calls], parts)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tokenizers.write(tokenizers.tiny(), tmp_path_factory.mktemp("model")))


@package
async def test_calls_are_found_and_all_else_is_text_however_the_answer_is_cut(parsers: Parsers, folder: Path) -> None:
    draw = random.Random(0)
    for parser, answer, text, calls in ANSWERS:
        edges = [[0, *sorted(draw.sample(range(len(answer)), 3)), len(answer)] for _ in range(4)]
        ways = [list(answer), [answer], *([answer[a:b] for a, b in pairwise(each)] for each in edges)]
        for pieces in ways:
            streamed = await found(parsers, folder, parser, pieces)
            assert (streamed.text, streamed.calls) == (text, calls), (parser, pieces)
        whole = await found(parsers, folder, parser, list(answer), whole=True)
        assert (whole.text, whole.calls) == (text, calls), parser


@package
async def test_text_without_calls_loses_only_marks_and_blanks(parsers: Parsers, folder: Path) -> None:
    draw = random.Random(1)
    marks = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
    for _ in range(100):
        pieces = draw.choices([*marks, "{", "}", "[", "a", "<", "'b': ", '"', " "], k=draw.randrange(1, 8))
        for parser in ("hermes", "llama3", "mistral", "enforced"):
            streamed = await found(parsers, folder, parser, pieces)
            left, text = "".join(pieces), streamed.text
            for mark in (*marks, " "):
                left, text = left.replace(mark, ""), text.replace(mark, "")
            assert (text, streamed.calls) == (left, []), (parser, pieces)


GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n</tool_call>"
CODER = "<tool_call>\n<function=now>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("parser", "answer", "text", "calls"),
    [
        ("hermes", f"So <tool_call>{BERN[:-9]}", "So ", [("weather", WEATHER[1][:-8])]),
        ("hermes", f"<tool_call>{NOW}</tool_call><tool_call>{BERN[:23]}", "", [CALLED, ("weather", "")]),
        ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
        ("llama3", BERN[:45], "", [("weather", WEATHER[1][:12])]),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": [', "", [("now", '{"a": [')]),
        ("glm45", GLM[:60], "", [("weather", '{"city": "Bern')]),
        ("qwen3_coder", "So <", "So <", []),
        ("gigachat3", "So <", "So <", []),
        ("enforced", f"[{BERN[:45]}", "", [("weather", WEATHER[1][:12])]),
        ("enforced", f'[{NOW}, {{"name": "we', "", [CALLED]),
        ("enforced", '[{"na', "", []),
    ],
)
@package
async def test_call_that_is_cut_has_the_arguments_so_far_whole_and_in_a_stream(
    parsers: Parsers, folder: Path, parser: str, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for whole in (False, True):
        cut = await found(parsers, folder, parser, list(answer), whole=whole, cut=True)
        assert (cut.text, cut.calls) == (text, calls), whole


@package
async def test_forced_call_of_the_only_tool_that_is_cut_before_its_name_has_it(parsers: Parsers, folder: Path) -> None:
    for whole in (False, True):
        cut = await found(parsers, folder, "enforced", ['[{"na'], whole=whole, cut=True, known=TOOLS[:1])
        assert (cut.text, cut.calls) == ("", [("weather", "")])


@package
async def test_answer_that_ends_in_a_broken_call_is_text_when_it_is_whole(parsers: Parsers, folder: Path) -> None:
    broken = f"<tool_call>{BERN[:-9]}"
    assert (await found(parsers, folder, "hermes", [broken], whole=True)).text == broken


@package
async def test_formats_that_only_sglang_knows_have_no_blanks_between_calls_and_no_unknown_tools(
    parsers: Parsers, folder: Path
) -> None:
    city = ("weather", '{"city": "Bern"}')
    for parser, answer, calls in (
        ("glm45", f"{GLM}\n{GLM}", [city, city]),
        ("qwen3_coder", f"{CODER}\n{CODER}", [CALLED, CALLED]),
        ("qwen3_coder", f"{CODER.replace('now', 'rm')}\n{CODER}", [CALLED]),
    ):
        for whole, pieces in ((False, list(answer)), (False, [answer]), (True, [answer])):
            heard = await found(parsers, folder, parser, pieces, whole=whole)
            assert (heard.text.strip(), heard.calls) == ("", calls), (parser, whole, pieces)
            assert heard.text == "" or "rm" in answer


@package
async def test_calls_beyond_the_allowed_number_are_left_out(parsers: Parsers, folder: Path) -> None:
    for whole in (False, True):
        one = await found(parsers, folder, "enforced", [f"[{NOW}, {BERN}]"], whole=whole, parallel=False)
        assert (one.text, one.calls) == ("", [CALLED])


@package
async def test_long_arguments_come_in_pieces_of_which_none_is_a_small_part_of_what_was_read(
    parsers: Parsers, folder: Path
) -> None:
    call = {"name": "now", "arguments": {"code": 'if (a) { b("}") }\\', "rows": [{}, {"a": {}}] * 600}}
    answer = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    streamed = await found(parsers, folder, "hermes", [answer[at : at + 5] for at in range(0, len(answer), 5)])
    (made,) = streamed.calls
    assert json.loads(made[1]) == call["arguments"]
    pieces = [part for part in streamed.parts if part.calls]
    assert 50 < len(pieces) < 300


@package
async def test_call_ids_differ_and_are_short_where_templates_require_it(parsers: Parsers, folder: Path) -> None:
    async def ids(parser: str, answer: str, must: bool = False) -> list[str]:
        tools: Any = Tools(TOOLS, must=must)
        splitter = parsers.splitter(Wanted(tools=parser), load(str(folder)), [], tools, whole=True)
        assert splitter is not None
        await splitter.push(answer, end=False)
        return [call.id for call in (await splitter.push("", end=True)).calls]

    two = f"<tool_call>{NOW}</tool_call><tool_call>{NOW}"
    first, second = await ids("hermes", two)
    assert first != second and first.startswith("call_")
    for must, answer in ((False, f"[TOOL_CALLS][{NOW}, {NOW}]"), (True, f"[{NOW}, {NOW}]")):
        assert [len(one) for one in await ids("mistral", answer, must)] == [9, 9]


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}{% endif %}', "llama3"),
        ("{{ tools }}<tool_call>{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}", "hermes"),
        ("{{ tools }}", ""),
    ],
)
@package
async def test_parser_of_calls_is_found_by_the_chat_template(
    parsers: Parsers, tmp_path: Path, template: str, parser: str
) -> None:
    tokenizer = load(tokenizers.write(tokenizers.tiny(), tmp_path, template + tokenizers.TEMPLATE))
    assert (await parsers.wanted(tokenizer, calls=True)).tools == parser
    assert (await parsers.wanted(tokenizer, tools="mistral", calls=True)).tools == "mistral"
