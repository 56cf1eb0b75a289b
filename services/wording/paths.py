"""Text for people who are not on the host: what is wrong, and with which file, but not where that lies."""

from __future__ import annotations

import re

_PART = r"[^\s/'\"`,;:()<>\[\]{}|]+"
_FOLDERS = re.compile(rf"(?:\bunix:|(?<![\w.:/<~-]))~?/(?:{_PART}/)+(?={_PART})")
"""Of absolute paths, with at least one folder: "</s>" and "tokens/s" are none."""


def without_folders(text: str) -> str:
    """The text with the last part alone of each absolute path in it, those of sockets included."""
    return _FOLDERS.sub("", text)
