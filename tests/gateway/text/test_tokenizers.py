"""Tokenizers in use, and the threads that work with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gateway.errors import TooMany
from gateway.text import tokenizers as tokenizers_module
from gateway.text.tokenizers import Tokenizers
from services.errors import Unmet
from services.runtime import tasks
from testing.patience import PATIENCE_S
from tokenization.loading import load
from tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> Tokenizer:
    return load(folder)


async def test_tokenizers_folder_is_loaded_once_for_concurrent_callers(tokenizer: Tokenizer) -> None:
    loads: list[str] = []
    go = threading.Event()

    def slow(path: str) -> Tokenizer:
        loads.append(path)
        go.wait(PATIENCE_S)
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


async def test_tokenizer_load_that_failed_is_tried_again(tokenizer: Tokenizer) -> None:
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


async def test_tokenizers_beyond_the_bound_are_dropped_least_recently_used_first(tokenizer: Tokenizer) -> None:
    loads: list[str] = []

    def counted(path: str) -> Tokenizer:
        loads.append(path)
        return tokenizer

    kept = Tokenizers(threads=1, kept=2, inline_characters=10, loader=counted)
    for path in ("a", "b", "a", "c", "a", "b"):
        await kept.get(path, 1)
    assert loads == ["a", "b", "c", "b"]
    kept.close()


async def test_long_texts_are_tokenized_in_a_thread_and_short_ones_inline(tokenizer: Tokenizer) -> None:
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


async def test_tokenizers_work_run_aside_leaves_a_thread_to_prompts(
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


async def test_tokenizer_work_waiting_aside_is_bounded(monkeypatch: pytest.MonkeyPatch, go: threading.Event) -> None:
    monkeypatch.setattr(tokenizers_module, "MOST_ASIDE", 1)
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
