"""Answers that a compiled grammar allows, drawn as an engine draws them, and who judges them."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import jsonschema
import numpy
import regress

_ENDS = b'"}],'


class Compiled:
    """A grammar in xgrammar, for the vocabulary that a gpu_scheduler tries grammars with."""

    def __init__(self, text: str, kind: str = "ebnf") -> None:
        from gpu_scheduler.engines.sglang.grammar import compiling

        compiler, self._vocabulary = _compiler()
        self._size = len(self._vocabulary)
        self._ends = {token for token, said in enumerate(self._vocabulary) if token == 0 or said in _ENDS}
        _, self._start = compiling.matcher(compiler, self._size, kind, text)

    def takes(self, answer: str) -> bool:
        """Whether that is a whole answer."""
        matcher = self._start.fork()
        return bool(matcher.accept_string(answer)) and bool(matcher.accept_token(0))

    def answers(self, draw: random.Random, count: int, most_tokens: int = 300) -> Iterator[str]:
        """Some; those that do not come to an end are left out."""
        for _ in range(count):
            said = self._walk(draw, most_tokens)
            if said is not None:
                yield said.decode()  # all that is allowed is UTF-8

    def _walk(self, draw: random.Random, most_tokens: int) -> bytes | None:
        from xgrammar import allocate_token_bitmask

        matcher, said = self._start.fork(), b""
        mask = allocate_token_bitmask(1, self._size)
        bits = mask.numpy().view(numpy.uint8)[0]
        hurry = draw.choice((0.1, 0.5, 0.9))
        for _ in range(most_tokens):
            mask.fill_(-1)
            matcher.fill_next_token_bitmask(mask)
            tokens = numpy.unpackbits(bits, count=self._size, bitorder="little").nonzero()[0].tolist()
            assert tokens, f"nothing may follow {said!r}"
            ends = [token for token in tokens if token in self._ends]
            token = draw.choice(ends if ends and draw.random() < hurry else tokens)
            assert matcher.accept_token(token)
            if token == 0:
                return said
            said += self._vocabulary[token]
        return None


@cache
def _compiler() -> tuple[Any, list[bytes]]:
    from xgrammar import TokenizerInfo, VocabType

    from gpu_scheduler.engines.sglang.grammar import compiling
    from gpu_scheduler.engines.sglang.grammar.sandbox import vocabulary

    known = vocabulary()
    return compiling.compiler(TokenizerInfo(known, VocabType.RAW, stop_token_ids=[0])), known


@cache
def _pattern(said: str) -> regress.Regex:
    return regress.Regex(said)


def _pattern_kept(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(instance, str) and _pattern(pattern).find(instance) is None:
        yield jsonschema.ValidationError(f"{instance!r} has no {pattern!r}")


def _multiple_kept(_: Any, of: Any, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    # As they are written: what a float makes of 0.07 is no multiple of what it makes of 0.01.
    if isinstance(instance, (int, float)) and not isinstance(instance, bool):
        if not math.isfinite(instance) or (Fraction(repr(instance)) / Fraction(repr(of))).denominator != 1:
            yield jsonschema.ValidationError(f"{instance} is no multiple of {of}")


def _named_kept(judge: Any, patterns: Any, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    for pattern, schema in patterns.items():
        for name, value in instance.items() if isinstance(instance, dict) else ():
            if _pattern(pattern).find(name) is not None:
                yield from judge.descend(value, schema, path=name, schema_path=pattern)


def _others_kept(judge: Any, others: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    for name, value in instance.items() if isinstance(instance, dict) else ():
        named = any(_pattern(pattern).find(name) is not None for pattern in schema.get("patternProperties", ()))
        if name not in schema.get("properties", ()) and not named:
            yield from judge.descend(value, others, path=name)


Judge = jsonschema.validators.extend(
    jsonschema.Draft202012Validator,
    {
        "pattern": _pattern_kept,
        "patternProperties": _named_kept,
        "additionalProperties": _others_kept,
        "multipleOf": _multiple_kept,
    },
)
"""Patterns by ECMA-262, numbers as they are written."""


def endless(schema: Any) -> bool:
    """Whether a schema refers to itself without an end, so that nobody can say what fits it."""
    done: set[int] = set()

    def goes_round(one: Any, within: tuple[int, ...]) -> bool:
        if not isinstance(one, dict) or (id(one) in done and id(one) not in within):
            return False
        if id(one) in within:
            return True
        inside = (*within, id(one))
        same = [one[name] for name in ("not", "if", "then", "else") if name in one]
        same += [part for name in ("allOf", "anyOf", "oneOf") for part in one.get(name, ())]
        same += one.get("dependentSchemas", {}).values()
        if "$ref" in one:
            same.append(target(one["$ref"], schema))
        found = any(goes_round(part, inside) for part in same)
        done.add(id(one))
        inner = [one[name] for name in ("items", "contains", "additionalProperties", "propertyNames") if name in one]
        inner += one.get("prefixItems", [])
        inner += [part for name in ("properties", "patternProperties") for part in one.get(name, {}).values()]
        return found or any(goes_round(part, ()) for part in inner)

    return goes_round(schema, ())


def target(reference: str, root: Any) -> Any:
    for key in reference.split("/")[1:]:
        root = root[key.replace("~1", "/").replace("~0", "~")]
    return root


def strict(answer: str) -> Any:
    """What a strict reader makes of it. Raises ValueError."""
    assert not re.search(r"[\x00-\x1f]", answer), answer
    return json.loads(answer)
