"""The model classes and parsers that SGLang has. The names are read from the source of the installed package, since
importing SGLang takes seconds and a GB."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_ENTRY = re.compile(r"^EntryClass(?::[^=]+)?\s*=\s*(\[[^\]]*\]|\([^)]*\)|\w+)", re.MULTILINE)
"""The list of classes in a file that SGLang serves, as SGLang's registry reads it."""
_NAME = re.compile(r"\w+")
_TABLES = {
    "reasoning": ("parser/reasoning_parser.py", "DetectorMap"),
    "tools": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
}
"""File below `srt`, and the name of its table of parsers, by kind."""


def has_class(name: str) -> bool:
    """Whether SGLang serves a model class of this name; True where SGLang is not installed beside the loader, since the
    engine then says so itself."""
    known = _classes()
    return not known or name in known


@cache
def parsers(kind: str) -> frozenset[str]:
    """Names of the parsers of a kind: "reasoning" or "tools"; none where SGLang is not installed beside the loader."""
    source = _source()
    if source is None:
        return frozenset()
    path, table = _TABLES[kind]
    for node in ast.walk(ast.parse((source / path).read_text("utf-8"))):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table:
            if isinstance(node.value, ast.Dict):
                return frozenset(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset()


@cache
def _classes() -> frozenset[str]:
    source = _source()
    if source is None:
        return frozenset()
    paths = (source / "models").rglob("*.py")
    lists = (entry for path in paths for entry in _ENTRY.findall(path.read_text("utf-8", "replace")))
    return frozenset(name for entry in lists for name in _NAME.findall(re.sub(r"#.*", "", entry)))


def _source() -> Path | None:
    """SGLang's folder `srt`; None where it is not installed."""
    found = find_spec("sglang")
    return None if found is None or found.origin is None else Path(found.origin).parent / "srt"
