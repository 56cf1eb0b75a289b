"""A model with states beside the KV of its tokens, in the whole system: it sleeps, wakes and moves."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protos import common_pb2
from testing import small_checkpoints
from testing.systems.local import FOLDER, MODELS, World, world
from tests.gpu_scheduler.engines.sglang import checkpoints

pytestmark = pytest.mark.sglang
MODEL, NEW_TOKENS = "states", 24


def with_tokenizer(folder: Path) -> Path:
    """A small mixture of experts with states and a part for images, with the tokenizer of another model."""
    small_checkpoints.write("Qwen3_5MoeForConditionalGeneration", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / MODELS[0] / name, folder / name)
    return folder


async def test_model_with_states_says_the_same_asleep_awake_and_at_another_place(tmp_path: Path) -> None:
    folder = with_tokenizer(tmp_path / "model")
    prompts = checkpoints.prompts(6)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = checkpoints.reference(folder, prompts, NEW_TOKENS)
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in said]

    async def answers(it: World) -> list[str]:
        streams = (it.stream(MODEL, prompt, NEW_TOKENS, ignore_eos=True) for prompt in prompts)
        return [text for text, _, _ in await asyncio.gather(*streams)]

    models = {MODEL: {"path": str(folder), "context_tokens": 256}}
    async with world("sglang", models, poison=True, warm=0, placement={"rebalance": False, "drain_ms": 0}) as it:
        assert await answers(it) == expected
        kinds = (await it.measured(MODEL)).kv_kinds
        assert [kind.name for kind in kinds] == ["attention", "state"]

        await it.evict(MODEL, common_pb2.HIBERNATING)
        assert await answers(it) == expected, "awake again"

        resident = await it.resident(MODEL)
        assert resident is not None
        running = asyncio.get_running_loop().create_task(answers(it))
        there = {"cpu:0": "cpu:1", "cpu:1": "cpu:0"}[resident[0]]
        await it.migrate(MODEL, there)
        assert await running == expected, "while it moves"
        resident = await it.resident(MODEL)
        assert resident is not None and resident[0] == there
        assert await answers(it) == expected

        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        status, answer = await it.post(
            "/v1/chat/completions",
            {"model": MODEL, "messages": [{"role": "user", "content": [image]}], "max_tokens": 1},
        )
        assert status == 400 and "image" in answer["error"]["message"]
