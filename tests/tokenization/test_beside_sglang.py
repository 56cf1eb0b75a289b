"""The gateway's token ids are those of SGLang's own server: of texts, of messages, of what ends an answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer

from gateway.openai.bodies import ChatRequest, parse
from services.errors import Invalid, Unmet
from tests.tokenization import folders
from tokenization import fidelity
from tokenization.loading import load

pytestmark = pytest.mark.sglang

TEXTS = [*fidelity.TEXTS, "", " leading and trailing ", "<s>[added] hello</s>", "hello world", "你好 😀"]
SAID = [{"role": "user", "content": "hello world"}, {"role": "assistant", "content": "the quick brown fox"}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hello world"}],
    [*SAID, {"role": "user", "content": "jumps over"}],
    [{"role": "system", "content": "one two three"}, {"role": "user", "content": "hello"}],
    [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]}],
    [
        *SAID[:1],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}],
        },
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "20"}, {"type": "text", "text": "C"}],
        },
        {"role": "user", "content": "lazy dog"},
    ],
]


@pytest.fixture(scope="module")
def sglangs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Folders by name, with what SGLang makes of each."""
    named = folders.published(tmp_path_factory.mktemp("published"))
    asked = {"folders": [str(path) for path in named.values()], "texts": TEXTS, "chats": CHATS}
    command = [sys.executable, "-m", "tests.tokenization.ask_sglang"]
    out = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    return dict(zip(named, zip(named.values(), json.loads(out.stdout), strict=True), strict=True))


def test_token_ids_of_texts_chats_and_ends_equal_those_of_sglang(
    sglangs: dict[str, tuple[Path, dict[str, Any]]],
) -> None:
    for name, (path, theirs) in sglangs.items():
        if not _is_as_written(path, theirs):
            continue
        tokenizer = load(str(path))
        bare = [tokenizer.encode(text, special=False) for text in TEXTS]
        assert bare == theirs["bare"], name
        assert [tokenizer.encode(text, special=True) for text in TEXTS] == theirs["special"], name
        assert [tokenizer.decode(ids) for ids in bare] == theirs["back"], name
        assert sorted(tokenizer.end_ids) == theirs["ends"], name
        for messages, ids in zip(CHATS, theirs["chats"], strict=False):
            if ids is None:
                with pytest.raises(Invalid):
                    tokenizer.chat(*_taken(messages))
            else:
                assert tokenizer.chat(*_taken(messages)) == ids, (name, messages)


def test_tokenizer_that_sglang_reads_wrongly_is_refused(sglangs: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    wrong = {name: path for name, (path, theirs) in sglangs.items() if not _is_as_written(path, theirs)}
    assert list(wrong) == ["another pattern as Qwen2Tokenizer"]
    for path in wrong.values():
        with pytest.raises(Unmet, match=r"becomes \[.*\] where tokenizer.json says \["):
            load(str(path))


def _is_as_written(path: Path, theirs: dict[str, Any]) -> bool:
    """Whether SGLang's server goes by the folder's tokenizer.json, special tokens in a text aside."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return True
    raw = RustTokenizer.from_file(str(file))
    said = [raw.encode(text, add_special_tokens=False).ids for text in fidelity.TEXTS]
    return said == theirs["bare"][: len(said)]


def _taken(messages: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Messages and options as a request for a chat hands them on."""
    prompt = parse(ChatRequest, json.dumps({"model": "m", "messages": messages}).encode()).conversation(None)
    return prompt.messages, prompt.template_options
