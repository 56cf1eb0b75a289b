"""Tables of rotary embeddings, beside what engines on an H200 held of published shapes (`gpu_formats_kinds.json`)."""

from __future__ import annotations

from typing import Any

import pytest

from loader.checkpoints.architectures.families import ModelShape
from loader.checkpoints.architectures.latent import Latent
from loader.checkpoints.architectures.rope_tables import row_bytes, table_bytes
from loader.checkpoints.architectures.two_shapes import FullHeads


def shape(architecture: str, head_dim: int, **more: Any) -> ModelShape:
    return ModelShape(architecture, 2, 64, 64, 4, 2, head_dim, 100, 64, tied=False, **more)


@pytest.mark.parametrize(
    ("found", "text", "floats"),
    [
        (shape("Qwen3ForCausalLM", 128), {}, 128),
        (shape("Qwen3_5ForConditionalGeneration", 256), {"partial_rotary_factor": 0.25}, 64),
        (shape("Qwen3_5ForConditionalGeneration", 256), {"rope_parameters": {"partial_rotary_factor": 0.25}}, 64),
        (shape("MiniMaxM2ForCausalLM", 128), {"rotary_dim": 64}, 64),
        (shape("Gemma3ForCausalLM", 256), {"rope_local_base_freq": 1e4}, 512),
        (
            shape("Gemma3ForCausalLM", 256),
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            512,
        ),
        (shape("Gemma4ForConditionalGeneration", 256, full=FullHeads(4, 512, True)), {}, 256 + 512),
        (shape("DeepseekV2ForCausalLM", 192, latent=Latent(512, 64, 128, 128, 0)), {}, 64),
        (shape("NemotronHForCausalLM", 128), {}, 0),
        (shape("UnknownForCausalLM", 80), {"rope_scaling": None}, 80),
    ],
)
def test_a_position_has_a_row_in_each_table_that_engines_make(
    found: ModelShape, text: dict[str, Any], floats: int
) -> None:
    assert row_bytes(found, text) == 4 * floats


def test_tables_of_gemma_4_31b_take_what_an_engine_holds_for_the_whole_context() -> None:
    held = 268_435_712 + 536_868_878  # the tables of layers with windows, and of the others
    found = table_bytes(4 * (256 + 512), 262_144)
    assert held < found < held + 2_000_000


def test_tables_are_made_for_the_context_that_is_served() -> None:
    assert table_bytes(256, 1800) == 2176 * 256 and table_bytes(256, 1912) == 2176 * 256
    assert table_bytes(256, 1913) == 2304 * 256 and table_bytes(0, 1913) == 0
