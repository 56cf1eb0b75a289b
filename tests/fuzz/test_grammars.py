"""Grammars that nobody would write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from testing.fuzz import schemas
from testing.fuzz.outcome import SurfaceOutcome

ROOT = Path(__file__).resolve().parents[2]
GRAMMARS = """
import json
from testing.fuzz import grammars
print(json.dumps(grammars.fuzz(cases=200, seed=1).as_json()))
"""
"""In a process of its own: each grammar is tried in two forks, and a process of tests takes long to fork."""


@pytest.mark.sglang
def test_grammars_accepted_by_the_check_do_not_end_an_engine() -> None:
    done = subprocess.run([sys.executable, "-c", GRAMMARS], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    outcome = SurfaceOutcome.of_json(json.loads(done.stdout))
    assert not outcome.faults
    assert outcome.answers["taken"] > 50


@pytest.mark.sglang
def test_fuzzed_schemas_are_enforced_or_refused() -> None:
    outcome = schemas.fuzz(cases=200, seed=1)
    assert not outcome.faults
    assert outcome.answers["kept"] > 50 and outcome.answers["answers"] > 200
    assert outcome.answers["fits, allowed"] > 20 * outcome.answers["fits, not allowed"]
