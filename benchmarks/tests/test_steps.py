"""What the simulator's cost model is fitted to: steps of running systems, by what they tell of themselves."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from benchmarks import decode_sharing, decode_steps, first_steps, prefill_steps

SHAPES = {"one": "1b", "other": "3b", "third": "8b"}


def row(at_s: float, **models: tuple[int, int, int]) -> dict[str, Any]:
    """Of each: requests that run, tokens that were decoded, prompt tokens."""
    keys = ("running", "decode_tokens", "prefill_tokens")
    told = {name: dict(zip(keys, of, strict=True)) | {"kv_used_bytes": 1000} for name, of in models.items()}
    return {"at_s": at_s, "group": "cuda:0", "models": told}


def test_engines_that_decode_side_by_side_count_with_what_each_ones_steps_took() -> None:
    rows = [row(0.0, one=(4, 0, 7), other=(6, 0, 9)), row(0.5, one=(4, 400, 7), other=(6, 300, 9))]
    (window,) = decode_sharing.windows("run", rows, SHAPES)
    assert [(each.shape, each.requests) for each in window.engines] == [("1b", 4.0), ("3b", 6.0)]
    assert [each.step_s for each in window.engines] == [pytest.approx(0.5 / 100), pytest.approx(0.5 / 50)]
    assert list(decode_steps.windows("run", rows, SHAPES)) == [], "that is of one alone"


@pytest.mark.parametrize(
    "after",
    [
        row(0.5, one=(4, 400, 8), other=(6, 300, 9)),  # a prompt
        row(0.5, one=(4, 400, 7), other=(2, 300, 9)),  # fewer requests by far
        row(0.5, one=(4, 400, 7), other=(6, 0, 9)),  # one that stands still
        row(0.1, one=(4, 400, 7), other=(6, 300, 9)),  # too short
        row(0.5, one=(4, 400, 7), other=(6, 300, 9), third=(0, 5, 0)),  # somebody came and went
    ],
)
def test_where_anything_else_went_on_nothing_counts(after: dict[str, Any]) -> None:
    before = row(0.0, one=(4, 0, 7), other=(6, 0, 9))
    assert list(decode_sharing.windows("run", [before, after], SHAPES)) == []


def test_a_prefill_step_counts_that_waited_whole_when_the_one_before_began() -> None:
    def line(second: float, event: str, **more: str) -> str:
        return json.dumps({"timestamp": f"2026-11-27T08:00:{second:09.6f}Z", "event": event, **more})

    def prefill(second: float, tokens: int, pending: int) -> str:
        return line(
            second,
            f"Prefill batch, #new-seq: 2, #new-token: {tokens}, #cached-token: 0, token usage: 0.98, "
            f"#running-req: 9, #queue-req: 1, #pending-token: {pending}, cuda graph: True",
        )

    lines = [
        prefill(0.0, 2048, 9000),  # whose is not known yet
        line(0.5, "model active", model="3b-1"),
        prefill(1.0, 2048, 9000),
        prefill(1.024, 2048, 7000),
        "not ours",
        prefill(1.049, 2048, 1000),
        prefill(1.070, 1000, 0),  # not whole
        prefill(1.090, 2048, 5000),  # came meanwhile
        line(1.100, "Decode batch, #running-req: 6, #token: 1797168"),
        prefill(1.115, 2048, 3000),
        line(1.120, "residency", model="3b-1"),
        prefill(1.139, 2048, 3000),
        prefill(1.400, 2048, 3000),  # something else went on
    ]
    found = list(prefill_steps.steps(lines))
    assert [step.shape for step in found] == ["3b", "3b"]
    assert [step.seconds for step in found] == pytest.approx([0.024, 0.025], abs=1e-5)


def test_first_steps_of_idle_engines_count_by_what_decodes_beside_them() -> None:
    begun = 1000.0

    def line(at_s: float, model: str, event: str) -> str:
        at = datetime.fromtimestamp(begun + at_s, UTC).isoformat()
        return json.dumps({"timestamp": at, "event": event, "model": model})

    def prefill(at_s: float, model: str, tokens: int = 16) -> str:
        return line(at_s, model, f"Prefill batch, #new-seq: 1, #new-token: {tokens}, #cached-token: 0")

    def decode(at_s: float, model: str, requests: int) -> str:
        return line(at_s, model, f"Decode batch, #running-req: {requests}, #token: 9")

    group = [
        prefill(1.03, "3b-1"),
        prefill(3.03, "3b-1"),
        decode(3.4, "3b-1", 24),
        prefill(3.73, "3b-1"),  # was not idle
        decode(6.0, "8b-1", 12),
        prefill(6.13, "3b-1"),
        decode(9.0, "8b-1", 24),
        prefill(9.09, "3b-1"),
        prefill(12.09, "3b-1", tokens=2048),  # not small
        "not ours",
    ]
    elsewhere = [decode(1.0, "8b-2", 24), prefill(15.05, "3b-1")]  # it had moved
    arrived = (1.0, 3.0, 3.7, 6.1, 9.0, 12.0, 15.0)
    firsts = (1.031, 3.031, 3.731, 6.131, 9.091, 12.091, 15.051)
    rows = [[at, "3b-1", 16, 8, first - at, 0.01, ""] for at, first in zip(arrived, firsts, strict=True)]
    result = {
        "circumstances": {"date": datetime.fromtimestamp(begun + 20.5, UTC).isoformat()},
        "seconds": 20.0,
        "systems": [{"samples": {"rows": rows}}],
    }
    found = list(first_steps.firsts_of(result, [first_steps.read(group), first_steps.read(elsewhere)]))
    assert [(each.shape, each.beside) for each in found] == [("3b", 0), ("3b", 0), ("3b", 12), ("3b", 24), ("3b", 0)]
    assert [each.seconds for each in found] == pytest.approx([0.03, 0.03, 0.03, 0.09, 0.05], abs=0.004)
    assert [first_steps.kind(each.beside) for each in found] == ["alone", "alone", "few", "many", "alone"]
