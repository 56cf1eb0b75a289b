"""Trials of grammars that take longer than they may, where that is a second."""

from __future__ import annotations

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang

BOUNDED = """
from gpu_scheduler.engines.sglang.grammar import sandbox
from tests.gpu_scheduler.engines.sglang.grammars import SLOW, large

sandbox.MOST_CPU_S = 0  # beside the second that a child has anyway
trials = sandbox.GrammarTrials()
for kind, text in (("ebnf", SLOW), ("json_schema", large(1500))):
    assert trials.verdict(kind, text) == "compiling it takes more than 0 s", kind
    assert trials.verdict("regex", "[a-z]{3}") == ""
"""


def test_grammar_that_takes_too_long_to_compile_or_to_follow_is_refused_and_the_next_one_compiled(
    imported: Imported,
) -> None:
    imported.run(BOUNDED)
