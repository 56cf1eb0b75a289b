"""Text that arrives token by token equals the text of all tokens, and never has half a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.detokenizer import ByteDetokenizer, WindowDetokenizer, detokenizer
from tests.gateway import tokenizers
from tokenization.tokenizer import Tokenizer


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
def test_detokenizer_gives_the_text_of_all_tokens_however_they_are_chunked(kind: str, data: st.DataObject) -> None:
    tokenizer = _tokenizer(kind)
    # Beyond the vocabulary too: models pad theirs.
    chunks = data.draw(st.lists(st.lists(st.integers(0, _size(kind) + 2), max_size=4), max_size=30))
    stream = detokenizer(tokenizer)
    text = "".join(stream.push(chunk) for chunk in chunks) + stream.finish()
    assert text == _whole(tokenizer, [token for chunk in chunks for token in chunk])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(text=st.text(max_size=40))
def test_detokenizer_never_returns_an_incomplete_character(kind: str, text: str) -> None:
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
def test_detokenizers_by_bytes_and_by_window_agree_on_byte_level_vocabularies(ids: list[int]) -> None:
    tokenizer = _tokenizer("byte level")
    by_bytes = ByteDetokenizer(tokenizer, tokenizer.special_ids)
    by_window = WindowDetokenizer(tokenizer, tokenizer.special_ids)
    texts = ["".join(stream.push([token]) for token in ids) + stream.finish() for stream in (by_bytes, by_window)]
    assert texts[0] == texts[1]


def test_detokenizer_returns_an_emoji_with_its_last_byte() -> None:
    tokenizer = _tokenizer("byte level")
    tokens = [token for token in range(_size("byte level")) if len(tokenizer.token_bytes(token)) == 1]
    by_byte = {tokenizer.token_bytes(token): token for token in tokens}
    stream = detokenizer(tokenizer)
    assert [stream.push([by_byte[bytes([byte])]]) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_special_tokens_have_text_only_if_requested() -> None:
    tokenizer = _tokenizer("byte level")
    end = next(iter(tokenizer.encode("</s>", special=False)))
    assert detokenizer(tokenizer).push([end]) == ""
    assert detokenizer(tokenizer, show_special=True).push([end]) == "</s>"


def test_words_of_a_sentence_piece_vocabulary_keep_their_spaces() -> None:
    tokenizer = _tokenizer("sentence piece")
    ids = tokenizer.encode("hello quick world", special=False)
    stream = detokenizer(tokenizer)
    assert "".join(stream.push([token]) for token in ids) + stream.finish() == "hello quick world"


def test_answer_that_continues_a_text_keeps_its_space() -> None:
    tokenizer = _tokenizer("sentence piece")
    prompt, answer = (tokenizer.encode(text, special=False) for text in ("hello", "quick world"))
    for before, text in (
        (prompt, " quick world"),
        ([*prompt, *tokenizer.encode("<|assistant|>", special=False)[-1:]], " quick world"),
        ([], "quick world"),
        (tokenizer.encode("<s>", special=False)[-1:], "quick world"),
        (tokenizer.encode("ñ", special=False), " quick world"),
    ):
        stream = detokenizer(tokenizer, before=before)
        assert "".join(stream.push([token]) for token in answer) + stream.finish() == text
        assert b"".join(map(tokenizer.token_bytes, answer)).decode() == " quick world"


@settings(max_examples=200)
@given(prompt=st.text("hello wrdñ世 ", min_size=1, max_size=12), answer=st.text("quick ñ世", max_size=12))
def test_detokenized_prompt_and_answer_are_one_text(prompt: str, answer: str) -> None:
    tokenizer = _tokenizer("sentence piece")
    before, ids = (tokenizer.encode(text, special=False) for text in (prompt, answer))
    stream = detokenizer(tokenizer, before=before)
    text = "".join(stream.push([token]) for token in ids) + stream.finish()
    assert tokenizer.decode(before) + text == tokenizer.decode([*before, *ids])


def test_bytes_at_a_prompts_end_are_no_part_of_an_answers_first_character() -> None:
    tokenizer = _tokenizer("sentence piece")
    byte = {tokenizer.token_bytes(token): token for token in range(_size("sentence piece")) if tokenizer.is_byte(token)}
    prompt = [*tokenizer.encode("hello", special=False), byte[b"\xe4"]]
    stream = detokenizer(tokenizer, before=prompt)
    assert "".join(stream.push([byte[bytes([one])]]) for one in "世".encode()) + stream.finish() == "世"


def test_detokenizer_end_token_has_no_text_even_if_not_special() -> None:
    tokenizer = _tokenizer("sentence piece")
    ids = tokenizer.encode("hello", special=False)
    ends = Tokenizer(tokenizer._hf)
    ends.special_ids, ends.end_ids = frozenset(), frozenset({ids[-1]})
    assert detokenizer(ends).push(ids[-1:]) == ""
