"""Schemas of every keyword: what is answered under the grammar of one fits it, and most of what fits is allowed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from gateway.schemas import grammar
from gateway.schemas.documents import SchemaRefused
from testing.fuzz.outcome import SurfaceOutcome
from testing.schemas.answers import Compiled, Judge, endless, strict
from testing.schemas.drawn import schemas, unions, values

_WALKS = 6


def fuzz(cases: int, seed: int) -> SurfaceOutcome:
    """Of so many schemas. Faults are not made smaller: the first of each kind is told as it was drawn."""
    outcome = SurfaceOutcome()

    @seeded(seed)
    @settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data(), st.randoms(use_true_random=False))
    def run(data: st.DataObject, draw: random.Random) -> None:
        schema = data.draw(st.one_of(schemas(), schemas(), unions()))
        told = data.draw(st.lists(values(schema, schema), max_size=4))
        outcome.cases += 1
        if endless(schema):
            outcome.answers["refers to itself without an end"] += 1
        else:
            _case(outcome, schema, told, draw)

    run()
    return outcome


def _case(outcome: SurfaceOutcome, schema: Any, told: Sequence[Any], draw: random.Random) -> None:
    judge = Judge(schema)
    fit = [value for value in told if judge.is_valid(value)]
    try:
        made = Compiled(grammar.of(schema))
    except SchemaRefused as refused:
        keyword = re.match(r"'([^']+)' at .* cannot be kept", str(refused))
        outcome.answers[f"refused: {keyword[1] if keyword else re.sub('[0-9]+|#.*', '', str(refused))[:60]}"] += 1
        if fit and "no answer" in str(refused):  # one of a type that no keyword speaks of, where none is said
            outcome.answers["fits what allows no answer"] += 1
        return
    outcome.answers["kept"] += 1
    for value in fit:
        outcome.answers[
            "fits, " + ("allowed" if made.takes(json.dumps(value, ensure_ascii=False)) else "not allowed")
        ] += 1
    for answer in made.answers(draw, _WALKS):
        outcome.answers["answers"] += 1
        if (found := next(judge.iter_errors(strict(answer)), None)) is not None:
            outcome.fault(f"{found.validator}: {answer} of {json.dumps(schema)}")
