"""What an engine does between two steps. The cases are in `loop_cases.py`: they need a process that has imported
SGLang."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
MODULE = "tests.gpu_scheduler.engines.sglang.step.loop_cases"
_SOURCE = Path(__file__).with_name("loop_cases.py").read_text()
CASES = [
    each.name for each in ast.parse(_SOURCE[_SOURCE.index("# --- cases") :]).body if isinstance(each, ast.FunctionDef)
]


@pytest.mark.parametrize("case", CASES)
def test_engine_loop_case_passes_in_a_process_that_has_imported_sglang(imported: Imported, case: str) -> None:
    imported.run(f"from {MODULE} import {case}\n{case}()")
