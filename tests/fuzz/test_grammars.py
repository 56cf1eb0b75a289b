"""Grammars that nobody would write."""

from __future__ import annotations

import pytest

from tests.fuzz.grammars import fuzz


@pytest.mark.sglang
def test_no_engine_ends_by_a_grammar_that_was_tried() -> None:
    outcome = fuzz(cases=200, seed=1)
    assert not outcome.faults
    assert outcome.answers["taken"] > 50
