"""The prefix tree over SGLang's own. The cases are in `tree_cases.py` and `window_tree_cases.py`: they need a process
that has imported SGLang."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.gpu_scheduler.engines.sglang.forks import Imported

pytestmark = pytest.mark.sglang
MODULE = "tests.gpu_scheduler.engines.sglang.kv.tree_cases"
_SOURCE = Path(__file__).with_name("tree_cases.py").read_text()
_CASES = [each for each in ast.parse(_SOURCE[_SOURCE.index("# --- cases") :]).body if isinstance(each, ast.FunctionDef)]
CASES = [each.name for each in _CASES if not each.name.startswith("_")]


@pytest.mark.parametrize("case", CASES)
def test_prefix_tree_case_passes_in_a_process_that_has_imported_sglang(imported: Imported, case: str) -> None:
    imported.run(f"from {MODULE} import {case}\n{case}()")


def test_pages_of_a_tree_of_two_kinds_are_free_or_in_one_node(imported: Imported) -> None:
    name = "pages_of_both_kinds_are_free_or_in_one_node"
    imported.run(f"from {MODULE.replace('tree_cases', 'window_tree_cases')} import {name}\n{name}()")
