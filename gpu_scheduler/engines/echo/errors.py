"""Errors of an echo engine's memory."""

from __future__ import annotations


class OutOfMemory(Exception):
    """balloond did not grant the memory; the message says what."""


class WrongPattern(Exception):
    """The content of the weights range is not the model's."""
