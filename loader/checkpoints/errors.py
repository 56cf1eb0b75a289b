"""Errors of checkpoints."""

from __future__ import annotations

from services.errors import Unmet


class BrokenCheckpoint(Unmet):
    """Raised for a folder that cannot be served until its files have changed. The message is one line that names the
    file, key or tensor. Clients see the message as the model's error, so it does not name the folder."""

    may_pass = False
    """Whether the same folder may be usable later, without a change."""


class PassingFault(BrokenCheckpoint):
    """Raised for a folder that cannot be read now, wholly or in part: a volume may be away, a copy under way, or memory
    or descriptors short."""

    may_pass = True
