"""Grammars that nobody would write."""

from __future__ import annotations

import pytest

from testing.fuzz import grammars, schemas


@pytest.mark.sglang
def test_grammars_accepted_by_the_check_do_not_end_an_engine() -> None:
    outcome = grammars.fuzz(cases=200, seed=1)
    assert not outcome.faults
    assert outcome.answers["taken"] > 50


@pytest.mark.sglang
def test_fuzzed_schemas_are_enforced_or_refused() -> None:
    outcome = schemas.fuzz(cases=200, seed=1)
    assert not outcome.faults
    assert outcome.answers["kept"] > 50 and outcome.answers["answers"] > 200
    assert outcome.answers["fits, allowed"] > 20 * outcome.answers["fits, not allowed"]
