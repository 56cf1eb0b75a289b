"""What a grammar allows is what its schema says: by answers that xgrammar allows, and a judge."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gateway.schemas import grammar
from gateway.schemas.documents import Refused
from tests.gateway.schemas.answers import Compiled, Judge, strict
from tests.gateway.schemas.drawn import schemas

pytestmark = pytest.mark.sglang
QUICK = settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), print_blob=False
)


@QUICK
@given(schemas(), st.randoms(use_true_random=False))
def test_no_answer_breaks_its_schema(schema: Any, draw: random.Random) -> None:
    judged(schema, draw)


def judged(schema: Any, draw: random.Random, walks: int = 6) -> None:
    try:
        made = grammar.of(schema)
    except Refused:
        assume(False)
        return
    judge = Judge(schema)
    for answer in Compiled(made).answers(draw, walks):
        wrong = next(judge.iter_errors(strict(answer)), None)
        assert wrong is None, f"{answer} of {json.dumps(schema)}: {wrong.message}"
