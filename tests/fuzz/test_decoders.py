"""Bodies and files that nobody would write."""

from __future__ import annotations

from pathlib import Path

from testing.fuzz import decoders

CASES = 500


def test_decoders_of_fuzzed_input_raise_only_documented_exceptions(tmp_path: Path) -> None:
    faults = {}
    for name, case, decode, may_raise in decoders.surfaces(tmp_path):
        outcome = decoders.fuzz(case, decode, may_raise, CASES, seed=1)
        assert outcome.cases == CASES
        if outcome.faults:
            faults[name] = outcome.faults
    assert not faults
