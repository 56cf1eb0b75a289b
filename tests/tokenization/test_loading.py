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
from tokenization.files import UnreadableNow
from tokenization.loading import load


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer.json", None, "there is no tokenizer.json or tokenizer.model"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer cannot be used: tokenizer.json: "),
        ("tokenizer.model", "no such thing", "tokenizer cannot be used: tokenizer.model: "),
        ("tokenizer_config.json", json.dumps({"eos_token": {"content": "</s>"}}), "used: tokenizer_config.json: "),
        ("tekken.json", "{}", "tekken.json"),
    ],
)
def test_folder_without_a_usable_tokenizer_is_refused_in_one_line_without_its_path(
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


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n"
JSON = ("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json")
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        *((name, POINTER, "is a Git LFS pointer: run git lfs pull") for name in (*JSON, *TEMPLATES)),
        *((name, b"\xff\xfe", "is not text in UTF-8: ") for name in (*JSON, *TEMPLATES)),
        *((name, b"{", "is not JSON: ") for name in JSON),
        *((name, b"[]", "is not a JSON object") for name in JSON),
        ("tokenizer.json", b"{}", ": Model missing"),
    ],
)
def test_file_of_no_valid_content_is_named_with_its_fault(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    folder = folders.write(tmp_path / "m", tokenizers.byte_level, {})
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    said, may_pass = trial.verdict(str(folder))
    assert said.removeprefix("its tokenizer cannot be used: ").startswith((f"{name} {why}", name + why))
    assert "\n" not in said and str(tmp_path) not in said and not may_pass


@pytest.mark.parametrize("name", JSON)
def test_file_that_is_empty_may_still_be_written(tmp_path: Path, name: str) -> None:
    folder = folders.write(tmp_path / "m", tokenizers.byte_level, {})
    (folder / name).write_bytes(b"")
    said, may_pass = trial.verdict(str(folder))
    assert said.endswith(f"{name} is empty") and may_pass


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "merges.txt", "pytorch_model.bin"])
def test_file_that_is_not_read_may_be_a_git_lfs_pointer(tmp_path: Path, name: str) -> None:
    folder = folders.write(tmp_path / "m", tokenizers.byte_level, {})
    (folder / name).write_bytes(POINTER)
    assert trial.verdict(str(folder)) == ("", False)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("tokenizer_class", 7, "= 7 is not a text"),
        ("tokenizer_class", "T5Tokenizer", "= 'T5Tokenizer' does not take its tokenizer.json ('dict' object"),
        ("tokenizer_class", "XLMRobertaTokenizer", "= 'XLMRobertaTokenizer' does not take its tokenizer.json ("),
        ("chat_template", 5, "= 5 is not a text, or a list of objects with name and template"),
        ("chat_template", [{"name": "default"}], "is not a text, or a list of objects"),
        ("added_tokens_decoder", {"5": "a"}, "is not an object with one of each token"),
        ("auto_map", 7, "= 7 is not an object or a list"),
        ("add_bos_token", "no", "= 'no' is not true or false"),
        ("eos_token", 7, "Special token eos_token has to be either str or AddedToken"),
        ("padding_side", "up", "Padding side should be"),
    ],
)
def test_impossible_setting_is_named_with_its_file(tmp_path: Path, key: str, value: object, why: str) -> None:
    folder = folders.write(tmp_path / "m", tokenizers.byte_level, {}, template=None)
    told = json.loads((folder / "tokenizer_config.json").read_text()) | {key: value}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    said, may_pass = trial.verdict(str(folder))
    assert said.removeprefix("its tokenizer cannot be used: ").startswith("tokenizer_config.json: ") and why in said
    assert "\n" not in said and not may_pass


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "foo"}, "config.json: model_type = 'foo' is not one that this version knows"),
        ({"model_type": ["llama"]}, "config.json: model_type = ['llama'] is not one that this version knows"),
        ({"model_type": None}, "config.json has no model_type"),
        ({"model_type": "t5"}, "config.json: the tokenizer of its model_type does not take its tokenizer.json ("),
    ],
)
def test_model_type_that_is_unknown_or_has_another_tokenizer_is_named(
    tmp_path: Path, config: dict[str, object], why: str
) -> None:
    said, _ = trial.verdict(str(folders.write(tmp_path / "m", tokenizers.byte_level, {}, config=config)))
    assert said.removeprefix("its tokenizer cannot be used: ").startswith(why)
    assert "pip" not in said and "\n" not in said


def test_folder_that_is_missing_is_reported_as_temporary(tmp_path: Path) -> None:
    with pytest.raises(UnreadableNow, match="folder is not there"):
        load(str(tmp_path / "away"))
    assert trial.verdict(str(tmp_path / "away")) == ("its folder is not there", True)


def test_file_with_a_read_error_is_reported_as_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folders.write(tmp_path / "m", tokenizers.byte_level, {})

    def fails(path: Path, *_: object, **__: object) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(Path, "read_bytes", fails)
    with pytest.raises(UnreadableNow, match="Input/output error") as refused:
        load(str(folder))
    assert str(tmp_path) not in str(refused.value)


def test_tokenizer_class_that_reads_its_file_differently_is_refused_with_the_text(tmp_path: Path) -> None:
    folders.write(tmp_path / "m", folders.with_split, {"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(Unmet, match="where tokenizer.json says .*tokenizer_class"):
        load(str(tmp_path / "m"))


def test_byte_level_tokenizer_under_another_class_is_read_as_its_file_says(tmp_path: Path) -> None:
    plain = load(str(folders.write(tmp_path / "plain", tokenizers.byte_level, {})))
    named = load(str(folders.write(tmp_path / "named", tokenizers.byte_level, {"tokenizer_class": "LlamaTokenizer"})))
    text = "a b  c\n\nd"
    assert named.byte_level
    assert named.encode(text, special=False) == plain.encode(text, special=False)
    assert named.decode(named.encode(text, special=False)) == text


def test_loading_a_correct_tokenizer_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_end_ids_are_those_of_the_tokenizer_and_those_that_sglang_adds(tmp_path: Path) -> None:
    found = load(str(folders.write(tmp_path / "m", folders.with_message_end, {})))
    assert {found.piece(token) for token in found.end_ids} == {"</s>", "<|eom_id|>"}


def test_trial_of_a_folder_names_the_part_that_cannot_be_used(tmp_path: Path) -> None:
    good = folders.write(tmp_path / "good", tokenizers.byte_level, {})
    assert trial.verdict(str(good)) == ("", False)
    broken = folders.write(tmp_path / "broken", tokenizers.byte_level, {}, template="{% if %}")
    assert trial.verdict(str(broken))[0].startswith("its chat template does not compile: ")
    refuses = folders.write(tmp_path / "refuses", tokenizers.byte_level, {}, template="{{ raise_exception('no') }}")
    assert trial.verdict(str(refuses))[0].startswith("its chat template makes no prompt of a message of a user: ")
    odd = folders.write(tmp_path / "odd", tokenizers.byte_level, {}, config={"num_hidden_layers": "many"})
    assert trial.verdict(str(odd))[0].startswith("its config.json cannot be used: ")
