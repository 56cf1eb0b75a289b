"""Weights from a seed have the names of the files that a folder has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.model_configs import config_of
from gpu_scheduler.engines.sglang.weights import random_weights
from loader.checkpoints.checkpoint import read, tensors_of
from testing import format_checkpoints


@pytest.mark.parametrize("name", ["qwen3.5-moe", "gemma4"])
def test_headers_are_enough_to_draw_a_checkpoint(name: str, tmp_path: Path) -> None:
    config = config_of(name)
    written = format_checkpoints.write(tmp_path / "written", config, "bf16")
    headers = format_checkpoints.write_headers(tmp_path / "headers", config)
    for folder in (written, headers):
        (folder / "tokenizer.json").write_text("{}")
    drawn = dict(random_weights.checkpoint(str(headers), torch.bfloat16, "cpu"))
    assert {each: tuple(tensor.shape) for each, tensor in drawn.items()} == {
        each: tensor.shape for each, tensor in tensors_of(written).items()
    }
    assert read(headers, 2).weights_bytes == read(written, 2).weights_bytes
    again = dict(random_weights.checkpoint(str(written), torch.bfloat16, "cpu"))
    assert all(torch.equal(tensor, again[each]) for each, tensor in drawn.items())


def test_without_files_the_names_are_those_of_transformers(tmp_path: Path) -> None:
    format_checkpoints.write_headers(tmp_path, config_of("qwen3"))
    named = {each for each, _ in random_weights.checkpoint(str(tmp_path), torch.float32, "cpu")}
    for path in (tmp_path / "model-text.safetensors", tmp_path / "model.safetensors.index.json"):
        path.unlink()
    assert {each for each, _ in random_weights.checkpoint(str(tmp_path), torch.float32, "cpu")} == named


def test_quantised_weights_are_not_drawn(tmp_path: Path) -> None:
    format_checkpoints.write(tmp_path, config_of("qwen3"), "fp8")
    with pytest.raises(ValueError, match="F8_E4M3: random weights are floats"):
        list(random_weights.checkpoint(str(tmp_path), torch.bfloat16, "cpu"))
