"""The model classes that SGLang has, by the source of its installed package: importing it takes seconds and a GB."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ENTRY = re.compile(r"^EntryClass(?::[^=]+)?\s*=\s*(\[[^\]]*\]|\([^)]*\)|\w+)", re.MULTILINE)
"""A file's list of the classes that SGLang serves by it, as its registry reads it."""
_NAME = re.compile(r"\w+")


def has(name: str) -> bool:
    """Whether SGLang serves a model class of this name; True where SGLang is not installed beside the loader, since the
    engine then says so itself."""
    known = _classes()
    return not known or name in known


@cache
def _classes() -> frozenset[str]:
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return frozenset()
    models = Path(found.origin).parent / "srt" / "models"
    lists = (entry for path in models.rglob("*.py") for entry in _ENTRY.findall(path.read_text("utf-8", "replace")))
    return frozenset(name for entry in lists for name in _NAME.findall(re.sub(r"#.*", "", entry)))
