"""Server-sent events of streamed answers, in OpenAI's two forms.

At some thousand events a second, building each as a dictionary and encoding it costs more than anything else here. So
everything that stays the same in a stream is encoded once, and an event is the bytes before the text, the text as JSON,
and the bytes after it.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
WAKING = b": waking\n\n"
"""A comment, which clients ignore."""
_BREAKS = re.compile(rb"\xe2\x80[\xa8\xa9]|\xc2\x85")


def _json(value: Any) -> bytes:
    """JSON without the characters at which clients end a line that part text as `str.splitlines` does (httpx)."""
    found = orjson.dumps(value)
    return found if found.isascii() else _BREAKS.sub(lambda end: b"\\u%04x" % ord(end[0].decode()), found)


class Events:
    """The events of one choice of one stream."""

    _before: bytes
    _text_end: bytes
    """Bytes that close what holds the text; the log-probabilities and the reason follow."""

    def __init__(self, head: dict[str, Any], index: int, with_usage: bool) -> None:
        """`head`: id, object, created and model. `with_usage`: the stream ends with the usage, so that all other events
        have a null usage."""
        self._start = b"data: " + _json(head)[:-1] + b',"choices":[{"index":%d,' % index
        self._usage = b',"usage":null' if with_usage else b""
        self._lay_out()
        self._after = self._text_end + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def _lay_out(self) -> None:
        raise NotImplementedError

    def opening(self) -> bytes:
        """The event before any text; empty if the form has none."""
        return b""

    def text(self, text: str) -> bytes:
        """An event with more text."""
        return self._before + _json(text) + self._after

    def scored(self, text: str, logprobs: Any) -> bytes:
        """An event with more text and log-probabilities."""
        scores = b',"logprobs":' + _json(logprobs) + b',"finish_reason":null}]'
        return self._before + _json(text) + self._text_end + scores + self._usage + b"}\n\n"

    def reasoning(self, text: str) -> bytes:
        """An event with more of the reasoning."""
        delta = b'"delta":' + _json({"reasoning_content": text})
        return self._start + delta + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def calls(self, deltas: list[dict[str, Any]]) -> bytes:
        """An event with calls of tools, or parts of them."""
        delta = b'"delta":' + _json({"tool_calls": deltas})
        return self._start + delta + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def finish(self, reason: str) -> bytes:
        """The last event of the choice."""
        ending = b',"logprobs":null,"finish_reason":' + _json(reason) + b"}]"
        return self._start + self._nothing() + ending + self._usage + b"}\n\n"

    def _nothing(self) -> bytes:
        raise NotImplementedError


class ChatEvents(Events):
    def _lay_out(self) -> None:
        self._before = self._start + b'"delta":{"content":'
        self._text_end = b"}"

    def opening(self) -> bytes:
        return self._start + b'"delta":{"role":"assistant","content":""' + self._after

    def _nothing(self) -> bytes:
        return b'"delta":{}'


class CompletionEvents(Events):
    def _lay_out(self) -> None:
        self._before = self._start + b'"text":'
        self._text_end = b""

    def _nothing(self) -> bytes:
        return b'"text":""'


def usage(head: dict[str, Any], counts: dict[str, Any]) -> bytes:
    """The event with the usage, after all choices have ended."""
    return b"data: " + _json({**head, "choices": [], "usage": counts}) + b"\n\n"


def named(event: str, data: dict[str, Any]) -> bytes:
    """An event with a name, as Anthropic's API and OpenAI's Responses have them."""
    return b"event: " + event.encode() + b"\ndata: " + _json(data) + b"\n\n"


def error(encoded: bytes) -> bytes:
    """The event for an error after the answer began; `encoded` is OpenAI's error JSON."""
    return b"data: " + encoded + b"\n\n"
