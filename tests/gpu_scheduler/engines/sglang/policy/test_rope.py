"""Numbers of rotary embeddings as SGLang is given them. That its tables are Transformers' is tested beside, with it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpu_scheduler.engines.sglang.policy.rope import for_latent, for_sglang

LONG = 2048
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4, "original_max_position_embeddings": 512}
SCALE = 0.1 * math.log(4) + 1
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0], "rope_theta": 1e4}


def made(
    told: dict[str, Any], positions: int = 512, original: int | None = None, context: int = LONG
) -> dict[str, Any]:
    found = for_sglang(told, positions, original, context)
    assert found["rope_type"] == found["type"], "some of SGLang reads the one, some the other"
    return found


def test_rope_factor_that_is_a_whole_number_becomes_a_float() -> None:
    for kind in ("linear", "dynamic"):
        factor = made({"rope_type": kind, "factor": 4, "original_max_position_embeddings": 512})["factor"]
        assert isinstance(factor, float) and factor == 4.0


def test_default_rope_has_no_factor_and_keeps_its_base() -> None:
    assert made({"rope_type": "default", "factor": 4.0, "rope_theta": 5.0}) == {
        "rope_type": "default",
        "type": "default",
        "rope_theta": 5.0,
    }


@pytest.mark.parametrize(("context", "kind"), [(0, "dynamic"), (512, "default"), (513, "dynamic"), (2048, "dynamic")])
def test_dynamic_rope_is_the_default_one_where_no_request_is_long_enough_for_it(context: int, kind: str) -> None:
    assert made({"rope_type": "dynamic", "factor": 4.0}, context=context)["rope_type"] == kind


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, SCALE),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, SCALE / (0.05 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 0}, SCALE),
        ({"attn_factor": 7.0, "mscale": 0.5}, SCALE),
    ],
)
def test_yarn_scales_attention_as_transformers_does(more: dict[str, float], scale: float) -> None:
    found = made({**YARN, **more})
    assert found["attn_factor"] * SCALE == pytest.approx(scale)
    assert not {"mscale", "mscale_all_dim", "attention_factor"} & found.keys()


def test_yarn_takes_its_original_length_from_beside_it_and_a_missing_factor_from_positions() -> None:
    assert made(YARN, original=128)["original_max_position_embeddings"] == 128
    assert made({**YARN, "factor": None}, positions=1024)["factor"] == 2.0
    assert made({**YARN, "beta_fast": None, "beta_slow": 2}).keys() & {"beta_fast", "beta_slow"} == {"beta_slow"}


def test_llama3_rope_is_given_to_sglang_as_it_is() -> None:
    told = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    assert made({**told, "type": "llama3", "original_max_position_embeddings": 64}) == {
        **told,
        "type": "llama3",
        "original_max_position_embeddings": 64,
    }


def test_longrope_has_one_list_of_factors_for_the_whole_served_context() -> None:
    for told in (LONGROPE, {**LONGROPE, "rope_type": "su", "type": "su"}):
        found = made(told, positions=2048, original=512)
        assert found["rope_type"] == "longrope" and found["short_factor"] == found["long_factor"] == [2.0, 4.0]
        assert found["short_mscale"] == found["long_mscale"] == math.sqrt(1 + math.log(4) / math.log(512))
    short = made(LONGROPE, positions=2048, original=512, context=512)
    assert (short["short_factor"], short["long_factor"]) == ([1.0, 1.0], [2.0, 4.0])
    assert made({**LONGROPE, "attention_factor": 1.5})["long_mscale"] == 1.5
    assert made(LONGROPE)["long_mscale"] == 1.0


def test_unknown_kind_of_rope_stays_as_it_is() -> None:
    told = {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    assert for_sglang(told, 512, None, 512) == told


def test_latent_attention_keeps_the_scales_of_yarn_that_the_published_formula_has() -> None:
    """The softmax is scaled by the square of one of them, sines and cosines by the quotient of both."""
    told = {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 32, "attention_bias": 1}
    assert for_latent(told, LONG, on_cpu=False) == {
        **YARN,
        "factor": 4.0,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
        "beta_fast": 32,
        "type": "yarn",
    }


def test_latent_attention_that_states_its_scale_has_no_other() -> None:
    told = {**YARN, "mscale": 2.0, "attention_factor": 0.8}
    found = for_latent(told, LONG, on_cpu=True)
    assert found["attn_factor"] * (0.1 * 2.0 * math.log(4) + 1) == pytest.approx(0.8)


def test_default_rope_of_latent_attention_is_one_that_stretches_by_one_on_a_cpu() -> None:
    told = {"rope_type": "default", "rope_theta": 5.0}
    assert for_latent(told, 512, on_cpu=False) == {**told, "type": "default"}
    assert for_latent(told, 512, on_cpu=True) == {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 5.0,
        "factor": 1.0,
        "original_max_position_embeddings": 512,
    }


def test_rope_of_another_kind_with_latent_attention_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'linear' are not supported with latent attention"):
        for_latent({"rope_type": "linear", "factor": 2.0}, 512, on_cpu=True)
