"""Grammars that nobody would write."""

from __future__ import annotations

import pytest

from testing.fuzz import grammars, schemas


@pytest.mark.sglang
def test_no_engine_ends_by_a_grammar_that_was_tried() -> None:
    outcome = grammars.fuzz(cases=200, seed=1)
    assert not outcome.faults
    assert outcome.answers["taken"] > 50


@pytest.mark.sglang
def test_schemas_are_kept_or_refused() -> None:
    outcome = schemas.fuzz(cases=200, seed=1)
    assert not outcome.faults
    assert outcome.answers["kept"] > 50 and outcome.answers["answers"] > 200
    assert outcome.answers["fits, allowed"] > 20 * outcome.answers["fits, not allowed"]
