"""Unmodified SGLang behind our socket: what the comparisons compare with has to answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import fleet, shapes
from benchmarks.gpu.fleet import Model
from benchmarks.gpu.formats import by_transformers
from protos import common_pb2
from testing import small_adapters, small_checkpoints
from testing.patience import PATIENCE_S

pytestmark = pytest.mark.sglang
GONE = common_pb2.Adapter(name="gone", base="stock", path="/nowhere", generation=1)


async def test_sglang_behind_our_socket_answers_with_an_adapter_too(tmp_path: Path) -> None:
    path = str(shapes.write_adapter(tmp_path / "a", "tiny", rank=8, seed=1))
    room = common_pb2.AdapterPool(slots=2, rank=8, modules=small_adapters.ALL)
    model = Model(shapes.write(tmp_path / "tiny", "tiny"), "cpu:0", 256, {"random_weights": 1}, adapters=room)
    client = await fleet.reference("stock", model, 2048)
    try:
        replies = [client.ask([5 + number] * 20, 8) for number in range(4)]
        await client.quiet(PATIENCE_S)
        assert [(reply.finish, len(reply.tokens), reply.error) for reply in replies] == [(common_pb2.LENGTH, 8, "")] * 4
        adapter = common_pb2.Adapter(name="a", base="stock", path=path, generation=1)
        other, missing = (client.ask([5] * 20, 8, adapter=each) for each in (adapter, GONE))
        await client.quiet(PATIENCE_S)
        assert other.ok and other.tokens != replies[0].tokens
        assert missing.finish == common_pb2.REJECTED and "cannot read adapter gone" in missing.error
    finally:
        await fleet.stop([client])


@pytest.mark.parametrize(
    "architecture", ["DeepseekV3ForCausalLM", "Qwen3_5ForCausalLM", "Gemma4ForConditionalGeneration"]
)
async def test_sglang_behind_our_socket_answers_as_transformers_for_every_kind_of_kv(
    architecture: str, tmp_path: Path
) -> None:
    folder = small_checkpoints.write(architecture, tmp_path / "model")
    prompts = [[5 + number] * (9 + 20 * number) for number in range(3)]
    client = await fleet.reference("stock", Model(folder, "cpu:0", 256, {"max_running_requests": 4}), 2048)
    try:
        replies = [client.ask(prompt, 6) for prompt in prompts]
        await client.quiet(PATIENCE_S)
        assert [reply.tokens for reply in replies] == [each.tokens for each in by_transformers(folder, prompts, 6)]
        assert client.stats.kv_limit_bytes > 0
    finally:
        await fleet.stop([client])
