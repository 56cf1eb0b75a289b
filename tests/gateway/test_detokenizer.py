"""Text that arrives token by token equals the text of all tokens, and never has half a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer
from gateway.tokenizer import Tokenizer
from tests.gateway import tokenizers


@cache
def _tokenizer(kind: str) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    rust = {"byte level": tokenizers.byte_level, "sentence piece": tokenizers.sentence_piece}[kind]()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>"))


def _whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode([token for token in ids if token not in tokenizer.special_ids])


@cache
def _size(kind: str) -> int:
    tokenizer = _tokenizer(kind)
    return next(token for token in range(10_000) if tokenizer.piece(token) is None)


KINDS = ["byte level", "sentence piece"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300)
@given(data=st.data())
def test_any_tokens_in_any_chunks_give_the_text_of_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer(kind)
    # Beyond the vocabulary too: models pad theirs.
    chunks = data.draw(st.lists(st.lists(st.integers(0, _size(kind) + 2), max_size=4), max_size=30))
    stream = detokenizer(tokenizer)
    text = "".join(stream.push(chunk) for chunk in chunks) + stream.finish()
    assert text == _whole(tokenizer, [token for chunk in chunks for token in chunk])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=st.text(max_size=40))
def test_no_half_character_is_ever_given_out(kind: str, text: str) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text.replace("\ufffd", ""), special=False)
    whole = _whole(tokenizer, ids)
    stream = detokenizer(tokenizer)
    told = ""
    for token in ids:
        told += stream.push([token])
        assert "\ufffd" not in told
        assert whole.startswith(told)
    assert told + stream.finish() == whole


@settings(max_examples=200)
@given(ids=st.lists(st.integers(0, _size("byte level") + 2), max_size=40))
def test_both_ways_agree_on_byte_level_vocabularies(ids: list[int]) -> None:
    tokenizer = _tokenizer("byte level")
    by_bytes = ByteDetokenizer(tokenizer, tokenizer.special_ids)
    by_window = WindowDetokenizer(tokenizer, tokenizer.special_ids)
    texts = ["".join(stream.push([token]) for token in ids) + stream.finish() for stream in (by_bytes, by_window)]
    assert texts[0] == texts[1]


def test_an_emoji_arrives_with_its_last_byte() -> None:
    tokenizer = _tokenizer("byte level")
    tokens = [token for token in range(_size("byte level")) if len(tokenizer.token_bytes(token)) == 1]
    by_byte = {tokenizer.token_bytes(token): token for token in tokens}
    stream = detokenizer(tokenizer)
    assert [stream.push([by_byte[bytes([byte])]]) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_special_tokens_have_text_only_when_asked() -> None:
    tokenizer = _tokenizer("byte level")
    end = next(iter(tokenizer.encode("</s>", special=False)))
    assert detokenizer(tokenizer).push([end]) == ""
    assert detokenizer(tokenizer, show_special=True).push([end]) == "</s>"


def test_words_of_a_sentence_piece_vocabulary_keep_their_spaces() -> None:
    tokenizer = _tokenizer("sentence piece")
    ids = tokenizer.encode("hello quick world", special=False)
    stream = detokenizer(tokenizer)
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == "hello quick world"
