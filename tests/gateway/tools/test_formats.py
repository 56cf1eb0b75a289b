import json
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import BadField
from gateway.tools import formats
from gateway.tools.formats import ENFORCED, FORMATS, CallFinder, Format, form
from gateway.tools.request import Tool, Tools

NAMES = {"weather", "now"}
BERN = '{"name": "weather", "arguments": {"city": "Bern {}<", "days": [1, 2]}}'
NOW = '{"name": "now", "parameters": {}}'
WEATHER = ("weather", {"city": "Bern {}<", "days": [1, 2]})

ANSWERS = [
    # (format, the answer, its text, its calls)
    ("hermes", f"Well.\n<tool_call>\n{BERN}\n</tool_call>", "Well.\n", [WEATHER]),
    ("hermes", f"<tool_call>{BERN}</tool_call>\n<tool_call>\n{NOW}\n</tool_call>", "", [WEATHER, ("now", {})]),
    ("hermes", f"<tool_call>{BERN}", "", [WEATHER]),
    ("hermes", "a <tool b </tool_call> c", "a <tool b </tool_call> c", []),
    ("hermes", '<tool_call>\n{"name": "weather", "arg', '<tool_call>{"name": "weather", "arg', []),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call> so', '{"name": "rm"} so', []),
    ("hermes", "<tool_call>[1]", "[1]", []),
    ("mistral", f"[TOOL_CALLS][{BERN}, {NOW}]", "", [WEATHER, ("now", {})]),
    ("mistral", f"Ok [TOOL_CALLS] [{BERN}]", "Ok ", [WEATHER]),
    ("mistral", "[TOOL", "[TOOL", []),
    ("llama3", f"{BERN}; {NOW}", "", [WEATHER, ("now", {})]),
    ("llama3", f"\n<|python_tag|>{BERN}", "", [WEATHER]),
    ("llama3", '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    ("llama3", 'It is {"a": 1}.', 'It is {"a": 1}.', []),
    ("llama3", "{not JSON", "{not JSON", []),
    ("enforced", f"[ {NOW} ,{BERN}]", "", [("now", {}), WEATHER]),
]


def found(kind: str, parts: list[str], **more: int) -> tuple[str, list[tuple[str, object]]]:
    finder = CallFinder({**FORMATS, "enforced": ENFORCED}[kind], NAMES, **more)
    text, calls = "", []
    for part in parts:
        said, complete = finder.push(part)
        text += said
        calls += [(call.name, json.loads(call.arguments)) for call in complete]
    assert finder.found == bool(calls)
    return text + finder.finish(), calls


@pytest.mark.parametrize(("kind", "answer", "text", "calls"), ANSWERS)
def test_tool_calls_are_found_and_all_else_is_text(
    kind: str, answer: str, text: str, calls: list[tuple[str, object]]
) -> None:
    assert found(kind, [answer]) == (text, calls)
    assert found(kind, list(answer)) == (text, calls)


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 120), max_size=6))
@example(next(each for each in ANSWERS if each[2] == "Ok "), [2])
def test_tool_calls_are_found_however_the_answer_is_cut(
    answer: tuple[str, str, str, list[tuple[str, object]]], cuts: list[int]
) -> None:
    kind, whole, text, calls = answer
    edges = [0, *sorted(cuts), len(whole)]
    parts = [whole[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert found(kind, parts) == (text, calls)


@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(["<tool_call>", "[TOOL_CALLS]", "{", "}", "a", "<"])))
def test_tool_formats_text_without_calls_loses_only_marks_and_spaces(kind: str, parts: list[str]) -> None:
    text, calls = found(kind, parts)
    assert calls == []
    left = "".join(parts)
    for mark in ("<tool_call>", "[", "TOOL_CALLS]"):
        left, text = left.replace(mark, ""), text.replace(mark, "")
    assert text == left


def test_tool_calls_beyond_the_allowed_number_are_dropped() -> None:
    assert found("enforced", [f"[{NOW}, {BERN}]"], most=1) == ("", [("now", {})])


@pytest.mark.parametrize(
    ("template", "known"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}', "llama3"),
    ],
)
def test_tool_format_is_found_by_the_chat_template(template: str, known: str) -> None:
    auto, must = (Tools([], must=must) for must in (False, True))
    assert form(auto, template) == FORMATS[known]
    assert form(must, template) == replace(ENFORCED, short_ids=known == "mistral")


def test_tools_of_a_model_without_them_are_refused_and_of_an_unknown_format_only_if_required() -> None:
    tool = Tool.model_validate({"type": "function", "function": {"name": "f"}})
    auto, must = (Tools([tool], must=must) for must in (False, True))
    for tools in (auto, must):
        with pytest.raises(BadField, match="takes no tools"):
            form(tools, "{{ messages }}")
    assert form(auto, "{{ tools }}") is None
    assert form(must, "{{ tools }}") == ENFORCED
    assert (
        form(auto, "{{ tools }}", "mistral") == form(auto, "{{ tools }} <tool_call>", "mistral") == FORMATS["mistral"]
    )


def test_tool_call_ids_differ_and_are_short_where_templates_require_it() -> None:
    def ids(kind: Format) -> list[str]:
        return [call.id for call in CallFinder(kind, NAMES).push(f"[TOOL_CALLS]<tool_call>{NOW}{NOW}")[1]]

    assert len(set(ids(FORMATS["hermes"]))) == 2 and ids(FORMATS["hermes"])[0].startswith("call_")
    assert {len(one) for one in ids(FORMATS["mistral"])} <= {9}


def test_long_tool_call_is_parsed_once_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[object, int]:
            parsed.append(s)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(formats, "_DECODER", Decoder())
    call = {"name": "now", "arguments": {"code": 'if (a) { b("}") }\\', "rows": [{}, {"a": {}}] * 20}}
    answer = f"<tool_call>{json.dumps(call)}</tool_call>"
    assert found("hermes", list(answer)) == ("", [("now", call["arguments"])])
    assert len(parsed) == 1
    parsed.clear()
    broken = "<tool_call>{now}" + "{}" * 20
    assert found("hermes", list(broken)) == (broken, [])
    assert len(parsed) == 1


@pytest.mark.parametrize("arguments", [r'{"a": "\ud800"}', r'"{\"a\": \"\ud800\"}"'])
def test_tool_call_arguments_with_a_lone_surrogate_can_be_encoded(arguments: str) -> None:
    finder = CallFinder(FORMATS["hermes"], NAMES)
    _, calls = finder.push(f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>')
    assert json.loads(calls[0].arguments.encode()) == {"a": "?"}
