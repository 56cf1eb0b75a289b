"""Errors of checkpoints."""

from __future__ import annotations

from services.errors import Unmet


class BrokenCheckpoint(Unmet):
    """Raised when a folder cannot be served before its files are others. The message is one line that names the file,
    key or tensor, but not the folder, which is the operator's business: it becomes the model's error, and clients are
    shown that."""

    may_pass = False
    """Whether the same folder may be usable later, without a change."""


class PassingFault(BrokenCheckpoint):
    """Raised when the folder, or something in it, is not there or cannot be read: a volume may be away, a copy under
    way, memory or descriptors short."""

    may_pass = True
