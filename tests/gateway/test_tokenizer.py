"""Tokenizers of folders, and the threads that work with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import normalizers

from gateway import tokenizer as tokenizer_module
from gateway.errors import TooMany
from gateway.tokenizer import Tokenizer, Tokenizers, TooLong, load
from services import tasks
from services.errors import Invalid, Unmet
from tests.gateway import tokenizers

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Tokenizer:
    return load(folder)


def test_text_gets_what_the_tokenizer_puts_around_it_only_when_asked(tokenizer: Tokenizer) -> None:
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


def test_a_chat_is_tokenized_by_its_template_without_a_second_start(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.chat(MESSAGES, {})) == "<s><|user|>hello\n<|assistant|>"
    assert tokenizer.decode(tokenizer.chat(MESSAGES, {"add_generation_prompt": False})) == "<s><|user|>hello\n"


def test_messages_that_the_template_refuses_say_why(tokenizer: Tokenizer) -> None:
    with pytest.raises(Invalid, match="no such role"):
        tokenizer.chat([{"role": "forbidden", "content": "x"}], {})


def test_half_a_character_suits_no_template(tokenizer: Tokenizer) -> None:
    """Arguments of calls are JSON in JSON, and may name one."""
    with pytest.raises(Invalid, match="do not suit"):
        tokenizer.chat([{"role": "user", "content": "\ud800"}], {})


def test_a_folder_without_a_template_says_so(tmp_path: Path) -> None:
    without = load(tokenizers.write(tokenizers.tiny(), tmp_path / "plain", template=None))
    with pytest.raises(Invalid, match="/v1/completions"):
        without.chat(MESSAGES, {})


def test_the_bytes_of_tokens_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "héllo 世界 😀"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, special=False))) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_the_bytes_of_a_sentence_piece_vocabulary_have_their_spaces(tmp_path: Path) -> None:
    other = load(tokenizers.write(tokenizers.sentence_piece(), tmp_path / "sp"))
    assert not other.byte_level
    ids = other.encode("hello world ñ", special=False)
    assert b"".join(map(other.token_bytes, ids)).decode().strip() == "hello world ñ"


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_folder_without_a_readable_tokenizer_is_refused_in_one_line(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises(Unmet) as refused:
        load(str(folder))
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


async def test_a_folder_is_loaded_once_for_all_who_wait(tokenizer: Tokenizer) -> None:
    loads: list[str] = []
    go = threading.Event()

    def slow(path: str) -> Tokenizer:
        loads.append(path)
        go.wait(10)
        return tokenizer

    kept = Tokenizers(threads=2, kept=8, inline_characters=10, loader=slow)
    waiting = [asyncio.get_running_loop().create_task(kept.get("a", 1)) for _ in range(5)]
    await asyncio.sleep(0)
    go.set()
    assert await asyncio.gather(*waiting) == [tokenizer] * 5
    assert await kept.get("a", 1) is tokenizer
    await kept.get("a", 2)
    assert loads == ["a", "a"]  # another generation is another tokenizer
    kept.close()


async def test_a_load_that_failed_is_tried_again(tokenizer: Tokenizer) -> None:
    outcomes: list[Tokenizer | Unmet] = [Unmet("not yet"), Unmet("not yet"), tokenizer]

    def flaky(path: str) -> Tokenizer:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Unmet):
            raise outcome
        return outcome

    kept = Tokenizers(threads=1, kept=8, inline_characters=10, loader=flaky)
    kept.prefetch([("a", 1)])
    with pytest.raises(Unmet):
        await kept.get("a", 1)
    with pytest.raises(Unmet):
        await kept.get("a", 1)
    assert await kept.get("a", 1) is tokenizer
    kept.close()


async def test_only_so_many_stay_in_memory_the_last_used_ones(tokenizer: Tokenizer) -> None:
    loads: list[str] = []

    def counted(path: str) -> Tokenizer:
        loads.append(path)
        return tokenizer

    kept = Tokenizers(threads=1, kept=2, inline_characters=10, loader=counted)
    for path in ("a", "b", "a", "c", "a", "b"):
        await kept.get(path, 1)
    assert loads == ["a", "b", "c", "b"]
    kept.close()


async def test_long_texts_are_worked_on_by_a_thread_and_short_ones_here(tokenizer: Tokenizer) -> None:
    kept = Tokenizers(threads=1, kept=2, inline_characters=10)
    assert await kept.run(10, threading.get_ident) == threading.get_ident()
    assert await kept.run(11, threading.get_ident) != threading.get_ident()
    kept.close()


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """What threads of a test wait for; at its end at the latest."""
    event = threading.Event()
    yield event
    event.set()


async def test_what_runs_aside_leaves_a_thread_to_prompts_and_keeps_its_turn_until_it_is_done(
    go: threading.Event,
) -> None:
    kept = Tokenizers(threads=2, kept=2, inline_characters=10)
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def long(name: str) -> str:
        loop.call_soon_threadsafe(began.set)
        go.wait()
        return name

    first = tasks.spawn(kept.run_aside(11, long, "first"), "a test")
    await began.wait()
    second = tasks.spawn(kept.run_aside(11, lambda: "second"), "a test")
    assert await kept.run_aside(10, lambda: "short") == "short"
    assert await kept.run(11, lambda: "a prompt") == "a prompt"
    first.cancel()  # its client is gone, its thread goes on
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await kept.run(11, lambda: "a prompt") == "a prompt"
    assert not second.done()
    go.set()
    assert await second == "second"
    kept.close()


async def test_no_more_wait_aside_than_a_bound(monkeypatch: pytest.MonkeyPatch, go: threading.Event) -> None:
    monkeypatch.setattr(tokenizer_module, "MOST_ASIDE", 1)
    kept = Tokenizers(threads=1, kept=2, inline_characters=10)
    works, waits = (tasks.spawn(kept.run_aside(11, go.wait), "a test") for _ in range(2))
    while not kept._waiting:
        await asyncio.sleep(0)
    with pytest.raises(TooMany, match="1 text is waiting"):
        await kept.run_aside(11, go.wait)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    later = tasks.spawn(kept.run_aside(11, go.wait), "a test")
    go.set()
    assert await works and await later
    kept.close()
