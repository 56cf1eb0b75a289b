"""Text for people who are not on the host: it says what is wrong with which file, but not where that file lies."""

from __future__ import annotations

import re

_PART = r"[^\s/'\"`,;:()<>\[\]{}|]+"
_FOLDERS = re.compile(rf"(?:\bunix:|(?<![\w.:/<~-]))~?/(?:{_PART}/)+(?={_PART})")
"""Folders of absolute paths, at least one: "</s>" and "tokens/s" have none."""


def without_folders(text: str) -> str:
    """The text with each absolute path, those of sockets included, cut to its last part."""
    return _FOLDERS.sub("", text)
