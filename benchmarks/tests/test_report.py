"""Tests of the JSON files that benchmarks on GPUs write: a value that is not a number is null."""

from __future__ import annotations

import json
import math
from pathlib import Path

from benchmarks.gpu import report


def test_a_mean_of_nothing_is_null_in_a_result(tmp_path: Path) -> None:
    report.write(tmp_path, "r", "none", {"rows": [{"mean": math.nan, "samples": (1.5, math.nan)}]})
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["rows"] == [{"mean": None, "samples": [1.5, None]}]
