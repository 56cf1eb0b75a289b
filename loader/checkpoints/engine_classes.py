"""The model classes that SGLang has, by the source of its installed package: importing it takes seconds and a GB."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)


def has(name: str) -> bool:
    """Whether SGLang has a model class of this name; True where SGLang is not installed beside the loader, since the
    engine then says so itself."""
    known = _classes()
    return not known or name in known


@cache
def _classes() -> frozenset[str]:
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return frozenset()
    models = Path(found.origin).parent / "srt" / "models"
    return frozenset(
        name for path in models.glob("*.py") for name in _CLASS.findall(path.read_text("utf-8", "replace"))
    )
