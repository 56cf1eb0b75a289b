"""Checks of checkpoints with Mamba layers, against published configurations of Nemotron models."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoints.architectures import families, mamba
from loader.checkpoints.checkpoint import check_config
from loader.checkpoints.errors import BrokenCheckpoint
from tests.loader.checkpoints.architectures.test_kv_of_config import NEMOTRON_3_NANO_30B_A3B, NEMOTRON_NANO_9B_V2

OF_BOTH = {"model_type": "nemotron_h", "vocab_size": 131_072, "max_position_embeddings": 131_072}
NANO_9B = {**NEMOTRON_NANO_9B_V2, **OF_BOTH, "intermediate_size": 15_680}
NANO_30B = {
    **NEMOTRON_3_NANO_30B_A3B,
    **OF_BOTH,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("config", "layers", "parameters"),
    [pytest.param(NANO_9B, 56, 8.89e9, id="9B"), pytest.param(NANO_30B, 52, 31.6e9, id="30B")],
)
def test_tensors_of_a_published_configuration_have_as_many_parameters_as_the_model(
    config: dict[str, Any], layers: int, parameters: float
) -> None:
    assert families.refusal(config) is None
    shape = families.read_shape(config)
    assert shape.layers == layers
    tensors = families.expected_tensors(shape, config)
    assert sum(map(prod, tensors.values())) == pytest.approx(parameters, rel=1e-3), "published in three digits"


def test_experts_are_read_only_where_a_layer_has_some() -> None:
    assert families.mixture_of(NANO_9B) is None
    mixture = families.mixture_of(NANO_30B)
    assert mixture is not None and families.experts_of(NANO_30B, mixture) == (128, 6)


@pytest.mark.parametrize(
    ("config", "quantised", "refused"),
    [
        pytest.param(NANO_30B, {"quant_method": "fp8", "activation_scheme": "dynamic"}, "", id="FP8"),
        pytest.param(NANO_30B, AWQ, "AWQ with 4 bits: kernels are for experts without a gate in FP8 only", id="AWQ"),
        pytest.param(NANO_9B, AWQ, "", id="AWQ, no experts"),
    ],
)
def test_quantised_experts_without_a_gate_are_refused_but_in_fp8(
    tmp_path: Path, config: dict[str, Any], quantised: dict[str, Any], refused: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantised}))
    if not refused:
        check_config(tmp_path, 2)
        return
    with pytest.raises(BrokenCheckpoint) as broken:
        check_config(tmp_path, 2)
    assert refused in str(broken.value)


def test_state_on_two_devices_is_half_of_its_heads_and_groups() -> None:
    one, two = (mamba.state_bytes(NANO_9B, 2, devices) for devices in (1, 2))
    assert one == 2 * two
