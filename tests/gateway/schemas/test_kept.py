"""What a grammar allows is what its schema says: by answers that xgrammar allows, values that may fit, and a judge.

`make fuzz` tries more of them (`testing/fuzz/schemas.py`).
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.schemas import grammar
from gateway.schemas.documents import SchemaRefused
from testing.schemas.answers import Compiled, Judge, endless, strict
from testing.schemas.drawn import numbers, schemas, strings, unions, values

pytestmark = pytest.mark.sglang


def cases(count: int) -> settings:
    return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@cases(300)
@given(st.one_of(schemas(), schemas(), unions()), st.integers(0, 2**32 - 1))
def test_answers_allowed_by_a_grammar_fit_its_schema(schema: Any, seed: int) -> None:
    judge = Judge(schema)
    for answer in kept(schema).answers(random.Random(seed), 6):
        found = next(judge.iter_errors(strict(answer)), None)
        assert found is None, f"{answer} of {json.dumps(schema)}: {found.message}"


def kept(schema: Any) -> Compiled:
    assume(not endless(schema))
    try:
        return Compiled(grammar.of(schema))
    except SchemaRefused:
        assume(False)
        raise


@cases(150)
@given(st.data())
def test_grammar_allows_numbers_and_strings_that_fit_and_no_others(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(("integer", "number", "string")))
    schema = {"type": kind, **data.draw(strings() if kind == "string" else numbers())}
    judge = Judge(schema)
    told = [value for value in data.draw(st.lists(values(schema, schema), max_size=20)) if written_plainly(value)]
    try:
        made = Compiled(grammar.of(schema))
    except SchemaRefused as error:
        assert "cannot be kept" in str(error) or not any(map(judge.is_valid, told)), error
        return
    for value in told:
        answer = json.dumps(value, ensure_ascii=False)
        assert made.takes(answer) == judge.is_valid(value), f"{answer} of {json.dumps(schema)}"


def written_plainly(value: Any) -> bool:
    """Whether it is written without an exponent."""
    return isinstance(value, str) or "e" not in repr(value)


def test_grammar_allows_most_values_that_fit() -> None:
    """But for what the documentation says: whole numbers with a point, items that are told apart in another order, and
    the like."""
    fits, taken = 0, 0

    @cases(300)
    @given(st.data())
    def count(data: st.DataObject) -> None:
        nonlocal fits, taken
        schema = data.draw(schemas())
        made, judge = kept(schema), Judge(schema)
        for value in data.draw(st.lists(values(schema, schema), min_size=3, max_size=8)):
            if judge.is_valid(value):
                fits += 1
                taken += made.takes(json.dumps(value, ensure_ascii=False))

    count()
    assert fits > 300 and taken / fits > 0.95, (fits, taken)
