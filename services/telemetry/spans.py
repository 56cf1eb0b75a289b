"""Spans of traces: what every process may call, whether traces are on or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]
Kind = Literal["internal", "server", "client"]


class Span:
    """One that is not recorded, and what one that is can do."""

    recorded = False
    """Ask before putting together what costs something and only goes into spans."""

    @property
    def traceparent(self) -> str:
        """For whom it calls; empty: nothing of the request is traced."""
        return ""

    @property
    def log_fields(self) -> Mapping[str, str]:
        """What log lines of the request are found by."""
        return {}

    def child(self, name: str, kind: Kind = "internal", *, at_s: float | None = None, link: Span | None = None) -> Span:
        """One that began now, or at `at_s`. `link`: a span of another tree that it had to do with."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Adds attributes, or replaces them."""

    def event(self, name: str) -> None:
        """Something happened now."""

    def fail(self, kind: str, text: str = "") -> None:
        """It ended in an error: `kind` is one of few words, `text` one line for people."""

    def end(self, at_s: float | None = None) -> None:
        """It ended now, or at `at_s`. Only the first call counts."""


UNTRACED = Span()
