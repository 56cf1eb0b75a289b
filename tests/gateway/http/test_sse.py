"""Events put together from parts are the JSON that encoding them whole would give."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.http import sse

HEAD = {"id": "x-1", "object": "chunk", "created": 1, "model": 'org/"m"'}


def data(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert len(event.decode().splitlines()) == 2, "an event is one line, also for clients that part text by Unicode"
    return dict(json.loads(event.removeprefix(b"data: ")))


@example(text="\x85 \u2028 \u2029", with_usage=False, index=0)
@given(text=st.text(), with_usage=st.booleans(), index=st.integers(0, 200))
def test_sse_events_of_chats_and_completions_carry_any_text_unchanged(text: str, with_usage: bool, index: int) -> None:
    usage = {"usage": None} if with_usage else {}
    rest = {"logprobs": None, "finish_reason": None}
    chat = data(sse.ChatEvents(HEAD, index, with_usage).text(text))
    assert chat == {**HEAD, "choices": [{"index": index, "delta": {"content": text}, **rest}], **usage}
    completion = data(sse.CompletionEvents(HEAD, index, with_usage).text(text))
    assert completion == {**HEAD, "choices": [{"index": index, "text": text, **rest}], **usage}


def test_sse_stream_of_a_chat_opens_with_the_role_and_of_a_completion_with_nothing() -> None:
    opening = data(sse.ChatEvents(HEAD, 0, False).opening())
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert sse.CompletionEvents(HEAD, 0, False).opening() == b""


def test_sse_event_of_scored_text_has_its_log_probabilities() -> None:
    logprobs = {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}]}
    choice = data(sse.ChatEvents(HEAD, 0, True).scored("a", logprobs))["choices"][0]
    assert choice == {"index": 0, "delta": {"content": "a"}, "logprobs": logprobs, "finish_reason": None}


def test_sse_last_event_of_a_choice_has_its_finish_reason() -> None:
    chat = data(sse.ChatEvents(HEAD, 0, False).finish("stop"))["choices"][0]
    assert chat == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    completion = data(sse.CompletionEvents(HEAD, 0, False).finish("length"))["choices"][0]
    assert completion == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_sse_usage_and_errors_are_events() -> None:
    assert data(sse.usage(HEAD, {"total_tokens": 3})) == {**HEAD, "choices": [], "usage": {"total_tokens": 3}}
    assert data(sse.error(b'{"error":{}}')) == {"error": {}}
