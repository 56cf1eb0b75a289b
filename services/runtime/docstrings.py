"""What classes of settings say of their fields, read from their source."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap

import pydantic


def of_fields(kind: type) -> dict[str, str]:
    """Field -> the docstring below it, in the class or in those that it extends."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each not in (object, pydantic.BaseModel):
            found |= _docs_of_class(each)
    return found


@functools.cache
def _docs_of_class(kind: type) -> dict[str, str]:
    """Field -> docstring, for the class without its bases."""
    return {
        field.target.id: _collapsed(below.value.value)
        for field, below in itertools.pairwise(_source(kind).body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def of_class(kind: type) -> str:
    """The docstring of the class in one line; empty if it has none."""
    return _collapsed(ast.get_docstring(_source(kind)) or "")


def _source(kind: type) -> ast.ClassDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    return node


def _collapsed(text: str) -> str:
    return " ".join(text.split())
