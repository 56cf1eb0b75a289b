"""Tokenizers of folders: text to ids, messages to ids, ids to bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import normalizers

from tests.gateway import tokenizers
from tokenization.loading import load
from tokenization.tokenizer import Tokenizer, TooLong


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tokenizers.write(tokenizers.tiny(), tmp_path_factory.mktemp("model")))


def test_text_is_encoded_with_special_tokens_only_on_request(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("hello", special=True)) == "<s>hello"
    assert tokenizer.decode(tokenizer.encode("hello", special=False)) == "hello"


def test_a_text_that_is_plainly_too_long_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(map(len, tokenizer._rust.get_vocab()))
    fits = "hello" * 20
    assert tokenizer.encode(fits, True, most=len(fits)) == tokenizer.encode(fits, True)
    monkeypatch.setattr(tokenizer, "_rust", None)
    with pytest.raises(TooLong, match="at least 11 tokens"):
        tokenizer.encode("z" * (10 * longest + 1), False, most=10)


def test_a_tokenizer_that_may_shorten_a_text_first_has_to_encode_it(tmp_path: Path) -> None:
    for number, kind in enumerate((tokenizers.byte_level(), tokenizers.sentence_piece())):
        if not number:
            kind.normalizer = normalizers.Strip()
        shortens = load(tokenizers.write(kind, tmp_path / str(number)))
        assert shortens.encode("hello" + " " * 10_000, False, most=1)


def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "héllo 世界 😀"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, special=False))) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_the_bytes_of_a_sentence_piece_vocabulary_have_their_spaces(tmp_path: Path) -> None:
    other = load(tokenizers.write(tokenizers.sentence_piece(), tmp_path / "sp"))
    assert not other.byte_level
    ids = other.encode("hello world ñ", special=False)
    assert b"".join(map(other.token_bytes, ids)).decode().strip() == "hello world ñ"
