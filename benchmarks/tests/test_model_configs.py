"""Configurations for checkpoints with random weights: the loader takes each, and published ones have the published
number of parameters."""

from __future__ import annotations

import math

import pytest

from benchmarks.gpu.formats import CASES
from benchmarks.gpu.model_configs import CONFIGS, config_of
from loader.checkpoints.architectures import families
from loader.checkpoints.architectures.kv_of_config import kv_layout

PUBLISHED = {
    "llama-3.1-8b": 8.03,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "gpt-oss-20b": 20.9,
    "deepseek-v2-lite": 15.7,
    "glm-4.7-flash": 29.9,
    "qwen3.6-27b": 26.9,
    "qwen3.6-35b-a3b": 34.7,
    "gemma-4-31b": 30.7,
    "gemma-4-26b-a4b": 25.2,
    "nemotron-3-nano-30b-a3b": 31.6,
}
"""Thousands of millions of parameters of text, without what predicts several tokens at once."""


def parameters(name: str) -> int:
    config = config_of(name)
    return sum(math.prod(size) for size in families.expected_tensors(families.read_shape(config), config).values())


@pytest.mark.parametrize("name", sorted({*CONFIGS, *(case.partition(":")[0] for case in CASES)}))
def test_configuration_is_one_that_the_loader_serves(name: str) -> None:
    assert parameters(name) > 0


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_shape_has_the_published_number_of_parameters(name: str) -> None:
    assert parameters(name) / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", ["qwen3.6-35b-a3b", "gemma-4-31b", "deepseek-v2-lite"])
def test_first_layers_of_a_model_have_its_kinds_of_kv_in_proportion(name: str) -> None:
    whole, part = (kv_layout(config_of(each), 2, one_pool=False) for each in (name, f"{name}@12"))
    layers = families.read_shape(config_of(name)).layers
    assert [kind.times(12) for kind in whole.kinds] == [kind.times(layers) for kind in part.kinds]


def test_configuration_that_is_not_known_is_an_error() -> None:
    with pytest.raises(KeyError):
        config_of("none@4")
