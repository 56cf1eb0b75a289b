"""What can be wrong with an echo engine's memory."""

from __future__ import annotations


class OutOfMemory(Exception):
    """The ledger did not grant it; the message says what."""


class WrongPattern(Exception):
    """The weights are not the model's."""
