"""What can be wrong with a checkpoint."""

from __future__ import annotations

from services.errors import Unmet


class BrokenCheckpoint(Unmet):
    """The folder cannot be served as it is. The message is one line that names the file, key or tensor; it becomes
    the model's error."""
