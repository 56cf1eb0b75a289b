"""Nemotron-H in the forms in which it is published, beside the one that every class is tested with
(`test_classes.py`): without experts, and with experts that work on a projection of the hidden state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.classes.test_classes import NEW_TOKENS, PROMPTS, says
from tests.gpu_scheduler.engines.sglang.classes.test_states import served
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
ARCHITECTURE = "NemotronHForCausalLM"


@pytest.mark.parametrize(
    ("changes", "published"),
    [
        pytest.param(
            {
                "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"],
                "mlp_bias": True,
                "use_bias": True,
                "use_conv_bias": False,
            },
            {"auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}},
            id="without experts",
        ),
        pytest.param(
            {"moe_latent_size": 40},
            {
                "hybrid_override_pattern": None,
                "layers_block_type": [
                    *("linear_attention", "moe", "full_attention"),
                    *("linear_attention", "mlp", "linear_attention"),
                ],
                "num_nextn_predict_layers": 1,
                "mtp_layers_block_type": ["full_attention", "moe"],
            },
            id="projected experts, as newer Transformers write it",
        ),
    ],
)
async def test_published_form_of_nemotron_says_what_transformers_says(
    tmp_path: Path,
    engines: Engines,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    published: dict[str, Any],
) -> None:
    known = classes.CLASSES[ARCHITECTURE]
    made = classes.SmallCheckpoint(known.config, known.changes | changes)
    monkeypatch.setitem(classes.CLASSES, ARCHITECTURE, made)
    folder = classes.write(ARCHITECTURE, tmp_path / "model")
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | published))
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 64 * KV_EXTENT)
        assert await says(end) == expected
