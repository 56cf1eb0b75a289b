"""Spans of traces: the calls that every process may make, whether traces are on or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]


class Span:
    """A span that is not recorded; subclasses record."""

    recorded = False
    """Whether the span is recorded. Ask before computing costly values that only go into spans."""

    @property
    def traceparent(self) -> str:
        """W3C traceparent that is sent along with calls made for this span; empty: the request is not traced."""
        return ""

    @property
    def log_fields(self) -> Mapping[str, str]:
        """Fields by which log lines of the request are found."""
        return {}

    def child(self, name: str, kind: Kind = "internal", *, at_s: float | None = None, link: Span | None = None) -> Span:
        """A child span that begins now, or at `at_s` (seconds of time.monotonic). `link`: a related span of another
        tree."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""

    def event(self, name: str) -> None:
        """Records that something happened now."""

    def fail(self, kind: str, text: str = "") -> None:
        """Marks the span as failed: `kind` is one of a few words, `text` one line for people."""

    def end(self, at_s: float | None = None) -> None:
        """Ends the span now, or at `at_s` (seconds of time.monotonic). Only the first call counts."""


UNTRACED = Span()
