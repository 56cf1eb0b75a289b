"""Grammars that do not begin with the answer, as xgrammar's structural tags: a model may reason first, or answer freely
until it calls a tool."""

from __future__ import annotations

import json
from typing import Any

from protos import common_pb2


def after_reasoning(sampling: common_pb2.Sampling, begin: str, end: str, *, begun: bool) -> None:
    """Lets the model reason before what the sampling's grammar allows. `begin`, `end`: texts around its reasoning.
    `begun`: the answer begins within it; otherwise the answer begins with `begin`, or with what the grammar allows."""
    reasoning = {"type": "tag", "begin": "" if begun else begin, "content": {"type": "any_text"}, "end": end}
    first = reasoning if begun else {"type": "optional", "content": reasoning}
    sampling.structural_tag = _text({"type": "sequence", "elements": [first, _format(sampling)]})


def after_mark(mark: str, grammar: str, several: bool) -> str:
    """The tag of an answer of any text, in which a text that the grammar allows follows `mark` wherever that is.
    `several`: it may be there more than once; otherwise the answer ends then."""
    tag = {"type": "tag", "begin": mark, "content": {"type": "grammar", "grammar": grammar}, "end": ""}
    return _text({"type": "triggered_tags", "triggers": [mark], "tags": [tag], "stop_after_first": not several})


def _format(sampling: common_pb2.Sampling) -> dict[str, Any]:
    """The sampling's grammar as a format of xgrammar's."""
    kind = sampling.WhichOneof("grammar")
    if kind == "ebnf":
        return {"type": "grammar", "grammar": sampling.ebnf}
    if kind == "regex":
        return {"type": "regex", "pattern": sampling.regex}
    assert kind == "structural_tag", kind
    found: dict[str, Any] = json.loads(sampling.structural_tag)["format"]
    return found


def _text(written: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": written}, ensure_ascii=False)
