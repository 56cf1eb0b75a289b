"""Models with latent attention (MLA) in the forms in which they are published: engines say what Transformers says, with
pages and overlapped steps as on a GPU, and what they make of the weights lies among the weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import engine_pb2
from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.classes.test_classes import NEW_TOKENS, PROMPTS, says, take_memory_away
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
CONTEXT = 256
PLAIN: dict[str, Any] = {"rope_scaling": None, "rope_theta": 5e4}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "V2 Lite": (
        "DeepseekV2ForCausalLM",
        {**ONE_GROUP, "topk_method": "greedy", "routed_scaling_factor": 1.0, "n_shared_experts": 2},
    ),
    "V2": ("DeepseekV2ForCausalLM", {"q_lora_rank": 40, "routed_scaling_factor": 16.0, "topk_group": 3}),
    "V3, other scales of sines and softmax": (
        "DeepseekV3ForCausalLM",
        {"rope_scaling": {**classes.YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0}},
    ),
    "V3, no latent queries, nothing stretched": (
        "DeepseekV3ForCausalLM",
        {**PLAIN, **ONE_GROUP, "q_lora_rank": None, "n_shared_experts": 1},
    ),
    "GLM 4.7 Flash, stretched": (
        "Glm4MoeLiteForCausalLM",
        {**ONE_GROUP, "n_shared_experts": 1, "rope_scaling": {**classes.YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
}


def write(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkpoint of this form."""
    architecture, changes = FORMS[form]
    given = classes.CLASSES[architecture]
    monkeypatch.setitem(classes.CLASSES, architecture, replace(given, changes={**given.changes, **changes}))
    return classes.write(architecture, folder)


@pytest.mark.parametrize("form", FORMS)
async def test_published_form_of_latent_attention_says_what_transformers_says(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = write(tmp_path / "model", form, monkeypatch)
    prompts = checkpoints.prompts(6)
    expected = checkpoints.reference(folder, prompts, NEW_TOKENS)
    found = read(folder, 4)
    config = json.loads((folder / "config.json").read_text())
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert found.kv_bytes_per_token == config["num_hidden_layers"] * row * 4
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        options = {"page_size": 16, "overlap": 1, "chunked_prefill_size": 48}
        kv = {"context_tokens": CONTEXT, "kv_bytes_per_token": found.kv_bytes_per_token}
        end.send(load=load(at, "m", folder, **options, **kv))
        (mapped,) = await end.mapped()
        assert (await end.hear("done")).done.measured.kv_bytes_per_token == found.kv_bytes_per_token
        assert made(mapped.manifest) == {
            f"model.layers.{layer}.self_attn.{part}" for layer in range(4) for part in ("w_kc", "w_vc")
        }
        for turn in ("once", "with what is cached"):
            for number, prompt in enumerate(prompts):
                end.ask(f"{turn} {number}", prompt, NEW_TOKENS, ignore_eos=True)
            said = [(await end.answer(f"{turn} {number}")).tokens for number in range(len(prompts))]
            assert said == expected, turn


def made(manifest: bytes) -> set[str]:
    """Names of the tensors among the weights that no checkpoint has, apart from tables."""
    tensors = engine_pb2.Manifest.FromString(manifest).tensors
    return {each.name for each in tensors if each.name.endswith(("w_kc", "w_vc"))}


async def test_pages_of_latent_rows_stay_right_while_memory_is_taken_away(tmp_path: Path, engines: Engines) -> None:
    folder = classes.write("DeepseekV3ForCausalLM", tmp_path / "model")
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    floor = floor_bytes(CONTEXT, 0, read(folder, 4).kv, KV_EXTENT)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor)
        paged = {"page_size": 4, "overlap": 1, "chunked_prefill_size": 64}
        await end.hold(load(at, "m", folder, context_tokens=CONTEXT, **paged))
        assert await says(end) == expected
        await take_memory_away(at, end, floor, expected)


async def test_what_is_made_of_random_weights_lies_among_them_too(tmp_path: Path, engines: Engines) -> None:
    folder = classes.write("DeepseekV2ForCausalLM", tmp_path / "model")
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        end.send(load=load(at, "m", folder, context_tokens=CONTEXT, random_weights=1))
        (mapped,) = await end.mapped()
        await end.hear("done")
        assert len(made(mapped.manifest)) == 2 * 4
        end.ask("one", checkpoints.prompts(1)[0], NEW_TOKENS, ignore_eos=True)
        assert len((await end.answer("one")).tokens) == NEW_TOKENS
