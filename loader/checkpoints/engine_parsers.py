"""The parsers of answers that SGLang has, by the source of its installed package: importing it takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TABLES = {
    "reasoning": ("parser/reasoning_parser.py", "DetectorMap"),
    "tools": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
}
"""File below `srt`, and the name of its table of parsers, by kind."""


@cache
def names(kind: str) -> frozenset[str]:
    """Names of the parsers of a kind: "reasoning" or "tools"; none where SGLang is not installed beside the loader."""
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return frozenset()
    path, table = _TABLES[kind]
    tree = ast.parse((Path(found.origin).parent / "srt" / path).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == table:
            if isinstance(node.value, ast.Dict):
                return frozenset(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset()
