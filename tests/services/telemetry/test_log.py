"""What the log shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAIL = """
from services.telemetry import log
log.configure("test", "info", {style!r})
def call(secret):
    raise RuntimeError("by the test")
try:
    call("sk-" + "prism-secret")
except RuntimeError:
    log.get("test").exception("call failed")
"""


@pytest.mark.parametrize("style", ["text", "json"])
def test_log_traceback_shows_no_values_of_variables(style: str) -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", FAIL.format(style=style)], capture_output=True, text=True, cwd=root, check=True
    )
    assert "by the test" in done.stderr and "Traceback" in done.stderr
    assert "sk-prism-secret" not in done.stderr


BOUND = """
import logging
from services.telemetry import log
log.configure("test", "info", "json")
with log.bound(model="a"):
    logging.getLogger("sglang.srt").info("a step")
logging.getLogger("sglang.srt").info("warm again")
"""


def test_log_facts_that_are_bound_are_in_the_lines_of_libraries_while_bound() -> None:
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, cwd=root, check=True)
    step, warm = (json.loads(line) for line in done.stderr.splitlines())
    assert (step["event"], step["model"]) == ("a step", "a")
    assert warm["event"] == "warm again" and "model" not in warm
