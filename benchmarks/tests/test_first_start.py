"""What is written down of a start, without starting anything."""

from __future__ import annotations

import json

import pytest

from benchmarks.gpu import first_start
from benchmarks.gpu.http_beside_sglang import Model
from deploy.local import introduction, kernels
from protos import placement_pb2


def test_an_8b_shape_on_a_gpu_unless_something_else_is_said(tmp_path):
    given = first_start.parse(["--out", str(tmp_path)])
    assert (given.model, given.device) == ("8b", "cuda:0")
    rehearsed = first_start.parse(["--out", str(tmp_path), "--rehearse"])
    assert rehearsed.device == "cpu" and rehearsed.model.startswith("llama-debian=/")
    for wrong in ([], ["--out", str(tmp_path), "--model", "9b"]):
        with pytest.raises(SystemExit):
            first_start.parse(wrong)


async def test_what_a_start_compiled_is_in_its_logs(tmp_path):
    events = [
        {"event": "kernel compiled", "timestamp": "2", "kernel": "rope", "ms": 7000.0},
        {"event": "kernel compiled", "timestamp": "1", "kernel": "kvcache", "ms": 500.0},
        {"event": "model active", "timestamp": "3", "steps": {"compiling kernels": 7.5}},
        {"event": "of no account", "timestamp": "4"},
    ]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gpu_scheduler.log").write_text("".join(json.dumps(each) + "\n" for each in events))
    start = first_start.Start(Model("m", tmp_path), "cuda:0", tmp_path, tmp_path)
    start._heard()
    assert (start.found["kernels_compiled"], start.found["compile_s"]) == (2, 7.5)
    assert [each["kernel"] for each in start.found["kernels"]] == ["kvcache", "rope"]
    assert start.found["activations"] == [events[2]]


def test_the_line_that_is_waited_for_is_what_a_system_says():
    said = introduction.introduction({}, placement_pb2.Cluster(), placement_pb2.Routes(), {}, "h:1", "prismctl")
    assert first_start.INTRODUCED in said
    assert set(first_start.CACHES) == set(kernels.CACHES)
