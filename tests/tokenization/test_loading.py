"""Folders whose text cannot be used, and what is said of them."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest

from services.errors import Unmet
from tests.gateway import tokenizers
from tests.tokenization import folders
from tokenization import trial
from tokenization.loading import UnreadableNow, load


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json or tokenizer.model"),
        ("tokenizer.json", "{", "tokenizer cannot be used: "),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer cannot be used: "),
        ("tokenizer.model", "no such thing", "tokenizer cannot be used: "),
        ("tokenizer_config.json", "[]", "tokenizer_config.json is not a JSON object"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON: "),
        ("tokenizer_config.json", json.dumps({"eos_token": {"content": "</s>"}}), "tokenizer cannot be used: "),
        ("tekken.json", "{}", "tekken.json"),
    ],
)
def test_a_folder_without_a_usable_tokenizer_says_why_in_one_line_without_its_place(
    tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    folder = tmp_path / "broken"
    if name == "tokenizer_config.json":
        folders.write(folder, tokenizers.byte_level, {"tokenizer_class": "PreTrainedTokenizerFast"})
    else:
        folder.mkdir()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(Unmet, match=why) as refused:
        load(str(folder))
    assert str(tmp_path) not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_away_is_said_to_be_and_may_be_back(tmp_path: Path) -> None:
    with pytest.raises(UnreadableNow, match="folder is not there"):
        load(str(tmp_path / "away"))
    assert trial.verdict(str(tmp_path / "away")) == ("its folder is not there", True)


def test_a_file_that_cannot_be_read_now_is_no_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.write(tmp_path / "m", tokenizers.byte_level, {})

    def fails(path: Path, *_: object, **__: object) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_text", fails)
    with pytest.raises(UnreadableNow, match="Input/output error") as refused:
        load(str(folder))
    assert str(tmp_path) not in str(refused.value)


def test_a_class_that_reads_a_file_otherwise_is_told_which_text_it_breaks(tmp_path: Path) -> None:
    folders.write(tmp_path / "m", folders.with_split, {"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(Unmet, match="where tokenizer.json says .*tokenizer_class"):
        load(str(tmp_path / "m"))


def test_a_byte_level_file_under_the_class_of_another_is_read_as_it_is(tmp_path: Path) -> None:
    plain = load(str(folders.write(tmp_path / "plain", tokenizers.byte_level, {})))
    named = load(str(folders.write(tmp_path / "named", tokenizers.byte_level, {"tokenizer_class": "LlamaTokenizer"})))
    text = "a b  c\n\nd"
    assert named.byte_level
    assert named.encode(text, special=False) == plain.encode(text, special=False)
    assert named.decode(named.encode(text, special=False)) == text


def test_nothing_is_warned_of_that_is_as_it_should_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers takes the pattern of every folder without a version in its config.json for a wrong one."""
    folder = folders.write(
        tmp_path / "m",
        folders.with_split,
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        config={"model_type": "mistral"},
    )
    with caplog.at_level(logging.WARNING):
        logging.getLogger("transformers").addHandler(caplog.handler)
        try:
            load(str(folder))
        finally:
            logging.getLogger("transformers").removeHandler(caplog.handler)
    assert caplog.messages == []


def test_ends_are_the_tokenizers_and_those_that_sglang_adds(tmp_path: Path) -> None:
    found = load(str(folders.write(tmp_path / "m", folders.with_message_end, {})))
    assert {found.piece(token) for token in found.end_ids} == {"</s>", "<|eom_id|>"}


def test_a_trial_names_what_cannot_be_used(tmp_path: Path) -> None:
    good = folders.write(tmp_path / "good", tokenizers.byte_level, {})
    assert trial.verdict(str(good)) == ("", False)
    broken = folders.write(tmp_path / "broken", tokenizers.byte_level, {}, template="{% if %}")
    assert trial.verdict(str(broken))[0].startswith("its chat template does not compile, line 1: ")
    odd = folders.write(tmp_path / "odd", tokenizers.byte_level, {}, config={"num_hidden_layers": "many"})
    assert trial.verdict(str(odd))[0].startswith("its config.json cannot be used: ")
