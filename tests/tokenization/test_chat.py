"""Messages to prompts: what templates know, leave out and refuse."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from services.errors import Invalid, Unmet
from tests.gateway import tokenizers
from tests.tokenization import folders
from tokenization.chat import TAKEN, UnknownRole, WrongMessage
from tokenization.loading import load
from tokenization.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hello"}]
WRITE = "{{ '<|' + m.role + '|>' + m.content }}"
KNOWN = "['system', 'user', 'assistant']"
LEAVES_OUT = "{% for m in messages %}{% if m.role in " + KNOWN + " %}" + WRITE + "{% endif %}{% endfor %}"
REFUSES = (
    "{% for m in messages %}{% if m.role not in "
    + KNOWN
    + " %}{{ raise_exception('unexpected role') }}{% endif %}"
    + WRITE
    + "{% endfor %}"
)
KNOWS_DEVELOPER = LEAVES_OUT.replace("'system'", "'system', 'developer'")
WRITES_ALL = "{% for m in messages %}" + WRITE + "{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tokenizers.write(tokenizers.tiny(), tmp_path_factory.mktemp("model")))


def with_template(folder: Path, template: str) -> Tokenizer:
    return load(tokenizers.write(tokenizers.tiny(), folder, template=template))


def said(tokenizer: Tokenizer, *messages: tuple[str, Any], **options: Any) -> str:
    return tokenizer.decode(tokenizer.chat([{"role": role, "content": content} for role, content in messages], options))


def test_a_chat_is_tokenized_by_its_template_with_one_start_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.chat(MESSAGES, {})) == "<s><|user|>hello\n<|assistant|>"
    assert tokenizer.decode(tokenizer.chat(MESSAGES, {"add_generation_prompt": False})) == "<s><|user|>hello\n"


def test_chat_that_the_template_refuses_raises_its_reason(tokenizer: Tokenizer) -> None:
    with pytest.raises(Invalid, match="no such role"):
        tokenizer.chat([{"role": "forbidden", "content": "x"}], {})


def test_chat_with_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    """Arguments of calls are JSON in JSON, and may name one."""
    with pytest.raises(Invalid, match="do not suit"):
        tokenizer.chat([{"role": "user", "content": "\ud800"}], {})


def test_chat_without_a_template_is_refused_with_a_hint_at_completions(tmp_path: Path) -> None:
    without = load(tokenizers.write(tokenizers.tiny(), tmp_path / "plain", template=None))
    with pytest.raises(Invalid, match="/v1/completions"):
        without.chat(MESSAGES, {})


@pytest.mark.parametrize("template", [LEAVES_OUT, REFUSES, WRITES_ALL], ids=["leaves out", "refuses", "writes all"])
def test_developer_role_becomes_system_where_the_template_does_not_name_it(tmp_path: Path, template: str) -> None:
    tokenizer = with_template(tmp_path, template)
    assert said(tokenizer, ("developer", "one"), ("user", "two")) == "<|system|>one<|user|>two"


def test_developer_role_stays_where_the_template_names_it(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, KNOWS_DEVELOPER)
    assert said(tokenizer, ("developer", "one"), ("user", "two")) == "<|developer|>one<|user|>two"


@pytest.mark.parametrize(
    ("template", "why"), [(LEAVES_OUT, "leaves out messages of the role 'critic'"), (REFUSES, "the role 'critic'")]
)
def test_role_that_the_template_does_not_know_is_refused_by_name(tmp_path: Path, template: str, why: str) -> None:
    tokenizer = with_template(tmp_path, template)
    for _ in range(2):
        with pytest.raises(UnknownRole, match=why) as refused:
            said(tokenizer, ("user", "one"), ("critic", "two"))
        assert refused.value.place == "[1].role"
    assert said(tokenizer, ("user", "one")) == "<|user|>one"


ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
ONE_CALL = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{{ m.content }}{% endfor %}"
)
NO_TOOL = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
WANTS_USER = (
    "{% if 'user' not in messages | map(attribute='role') | list %}{{ raise_exception('no user') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "roles", "place"),
    [
        (NO_TOOL, "user tool user", "[1].role"),
        (NO_TOOL, "user assistant tool tool user tool", "[2].role"),
        (NO_TOOL, "tool user", "[0].role"),
        (NO_TOOL, "system user system", "[2].role"),
        (ALTERNATES, "user assistant tool user", "[2].role"),
        (ALTERNATES, "user user", "[1].role"),
        (ALTERNATES, "system user", "[0].role"),
        (ONE_CALL, "user assistant called user", "[2]"),
        (NO_TOOL, "tool", None),
        (WANTS_USER, "system assistant", None),
        (ALTERNATES, "user user user user", None),
    ],
)
def test_message_that_the_template_refuses_is_found_by_trying_without_it(
    tmp_path: Path, template: str, roles: str, place: str | None
) -> None:
    tokenizer = with_template(tmp_path, template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    known: dict[str, Any] = {"called": {"role": "assistant", "content": "", "tool_calls": [call, call]}}
    with pytest.raises(Invalid, match="refused the messages") as refused:
        tokenizer.chat([known.get(role, {"role": role, "content": "one"}) for role in roles.split()], {})
    assert (refused.value.place if isinstance(refused.value, WrongMessage) else None) == place


def test_names_that_transformers_and_jinja_use_are_no_options_of_a_template() -> None:
    signatures = (PreTrainedTokenizerBase.apply_chat_template, chat_template_utils.render_jinja_template)
    arguments = [one for each in signatures for one in inspect.signature(each).parameters.values()]
    named = {one.name for one in arguments if one.kind != inspect.Parameter.VAR_KEYWORD}
    known = chat_template_utils._compile_jinja_template("").environment.globals
    assert TAKEN == named | {"messages"} | set(known)


def test_tool_message_that_the_template_leaves_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownRole, match="'tool'"):
        said(with_template(tmp_path, LEAVES_OUT), ("user", "one"), ("tool", "two"))


def test_role_that_is_left_out_is_refused_though_another_message_has_its_content(tmp_path: Path) -> None:
    """Its content is in the prompt, but of another message."""
    with pytest.raises(UnknownRole):
        said(with_template(tmp_path, LEAVES_OUT), ("critic", "one"), ("user", "one"))


def test_template_that_writes_any_role_accepts_an_unusual_one(tmp_path: Path) -> None:
    assert said(with_template(tmp_path, WRITES_ALL), ("critic", "one")) == "<|critic|>one"


def test_roles_invented_by_clients_are_bounded(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, WRITES_ALL)
    with pytest.raises(Invalid, match="have 33 roles: at most 32"):
        said(tokenizer, *((f"role {number}", "x") for number in range(33)))
    for number in range(100):
        assert said(tokenizer, (f"role {number}", "x"), ("r" * 1000, "x"))
    assert len(tokenizer._chat._written) == 32 and max(map(len, tokenizer._chat._written)) < 1000


def test_message_without_content_of_an_unknown_role_is_accepted(tmp_path: Path) -> None:
    assert said(with_template(tmp_path, LEAVES_OUT), ("critic", ""), ("user", "one")) == "<|user|>one"


def test_reasoning_that_a_template_drops_does_not_count_as_a_dropped_role(tmp_path: Path) -> None:
    drops = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] }}{% endfor %}"
    tokenizer = with_template(tmp_path, drops)
    assert said(tokenizer, ("assistant", "<think>one</think>"), ("user", "two")) == "<|assistant|><|user|>two"


def test_a_role_that_the_template_only_merges_is_known(tmp_path: Path) -> None:
    merges = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content + ' ' %}{% set rest = messages[1:] %}"
        "{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{{ '<|user|>' + (s if loop.first else '') + m.content }}{% endfor %}"
    )
    assert said(with_template(tmp_path, merges), ("system", "one"), ("user", "two")) == "<|user|>one two"


def test_parts_of_a_content_are_one_text_or_a_list_as_the_template_takes_them(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert said(with_template(tmp_path / "text", WRITES_ALL), ("user", parts)) == "<|user|>one two"
    in_parts = with_template(tmp_path / "parts", folders.IN_PARTS)
    assert said(in_parts, ("user", parts)) == "<|user|>[one][two]<|assistant|>"
    assert said(in_parts, ("user", "one")) == "<|user|>one<|assistant|>"


def test_a_template_that_takes_nothing_but_parts_is_given_parts(tmp_path: Path) -> None:
    only = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert said(with_template(tmp_path, only), ("user", parts)) == "onetwo"


def test_a_template_that_wants_bare_functions_gets_them(tmp_path: Path) -> None:
    wants_bare = (
        "{% for t in tools or [] %}{{ t.name + ' ' }}"
        "{% if not t.name %}{{ raise_exception('none') }}{% endif %}{% endfor %}"
    )
    tokenizer = with_template(tmp_path, wants_bare + WRITES_ALL)
    tools = [{"type": "function", "function": {"name": "one", "parameters": {}}}]
    assert said(tokenizer, ("user", "two"), tools=tools) == "one <|user|>two"


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ m | no_such_filter }}", "{% if %}"])
def test_template_that_does_not_compile_makes_the_folder_unusable(tmp_path: Path, template: str) -> None:
    match = "its chat template does not compile: chat_template of tokenizer_config.json, line 1: "
    with pytest.raises(Unmet, match=match):
        with_template(tmp_path, template)


@pytest.mark.parametrize("wrong", ["{{ 1 // 0 }}", "{{ range(10 ** 9) }}", "{{ messages[0].content.x.y }}"])
def test_template_that_fails_on_some_messages_makes_the_request_invalid(tmp_path: Path, wrong: str) -> None:
    tokenizer = with_template(tmp_path, WRITES_ALL + "{% if messages | length > 2 %}" + wrong + "{% endif %}")
    with pytest.raises(Invalid, match="chat template"):
        said(tokenizer, ("user", "one"), ("assistant", "two"), ("user", "three"))


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1/0 }}", "ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ raise_exception('one\ntwo') }}", "one two"),
        ("{{ messages[0].content.x.y }}", "'str object' has no attribute 'x'"),
        ("{{ range(10 ** 9) }}", "OverflowError: Range too big"),
        ("{% for m in messages %}{{ m.text.strip() }}{% endfor %}", "'dict object' has no attribute 'text'"),
        ("Hello!", "The model's chat template leaves out messages of the role 'user'."),
    ],
)
def test_template_that_refuses_every_chat_makes_the_folder_unusable_with_its_reason(
    tmp_path: Path, template: str, why: str
) -> None:
    with pytest.raises(Unmet) as refused:
        with_template(tmp_path, template)
    before = "its chat template makes no prompt of a message of a user: chat_template of tokenizer_config.json: "
    assert str(refused.value).startswith(before + why)
    assert "\n" not in str(refused.value)


def test_template_in_its_own_file_is_named_by_that_file_in_errors(tmp_path: Path) -> None:
    folder = Path(tokenizers.write(tokenizers.tiny(), tmp_path / "m"))
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(Unmet, match=r"of a user: chat_template\.jinja: no$"):
        load(str(folder))
    (folder / "chat_template.jinja").write_text("\n{% if %}")
    with pytest.raises(Unmet, match=r"does not compile: chat_template\.jinja, line 2: Expected"):
        load(str(folder))


def test_wrong_template_among_several_is_named(tmp_path: Path) -> None:
    folder = Path(tokenizers.write(tokenizers.tiny(), tmp_path / "m"))
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(WRITES_ALL)
    with pytest.raises(Unmet, match=r"tool_use\.jinja: none of its templates \(tool_use\) is named default"):
        load(str(folder))
    (folder / "chat_template.jinja").write_text(WRITES_ALL)
    assert said(load(str(folder)), ("user", "one")) == "<|user|>one"
    (more / "tool_use.jinja").write_text("{% if %}")
    with pytest.raises(Unmet, match=r"does not compile: additional_chat_templates/tool_use\.jinja, line 1: "):
        load(str(folder))


@pytest.mark.parametrize(
    "wants",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + WRITES_ALL,
        "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + WRITES_ALL,
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% if messages[-1].role != 'user' %}{{ raise_exception('a user is last') }}{% endif %}" + WRITES_ALL,
        "{% if not tools is defined %}{{ raise_exception('?') }}{% endif %}" + WRITES_ALL,
    ],
    ids=["no system", "a system", "parts", "a user last", "tools named"],
)
def test_template_that_accepts_the_plainest_chat_in_some_form_is_used(tmp_path: Path, wants: str) -> None:
    assert with_template(tmp_path, wants).template == wants
