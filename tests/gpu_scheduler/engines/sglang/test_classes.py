"""Every model class that is served says what Transformers says: from files, while its memory is taken away, and from
its image after it slept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import engine_pb2
from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, EngineEnd, Images, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEW_TOKENS, CONTEXT = 12, 128
WEIGHTS_EXTENT = 1 << 20
"""Bytes that a node of tests hands weights out in."""
PROMPTS = [checkpoints.prompts(12)[number] for number in (0, 1, 2, 4)]
"""Of 31 to 105 tokens, longer than the windows; one begins like the one before it."""


async def says(end: EngineEnd) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        end.ask(f"{number}", prompt, NEW_TOKENS, ignore_eos=True)
    said = [(await end.answer(f"{number}")).tokens for number in range(len(PROMPTS))]
    end.answers.clear()
    return said


@pytest.mark.parametrize("architecture", classes.CLASSES)
async def test_answers_of_a_class_equal_those_of_transformers(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    assert len({tuple(one) for one in expected}) == len(PROMPTS), "answers that are all alike show nothing"
    found = read(folder, 4)
    floor = floor_bytes(CONTEXT, 0, found.kv_bytes_per_token, KV_EXTENT)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor)
        images = Images(at)
        kv = found.kv_bytes_per_token
        end.send(load=load(at, "m", folder, context_tokens=CONTEXT, kv_bytes_per_token=kv, chunked_prefill_size=64))
        (mapped,) = await end.mapped()
        measured = (await end.hear("done")).done.measured
        assert measured.kv_bytes_per_token == found.kv_bytes_per_token
        assert found.weights_bytes <= measured.weights_bytes < found.weights_bytes + WEIGHTS_EXTENT
        assert await says(end) == expected

        image = await images.take(mapped.lease_id)
        await end.do(hibernate=engine_pb2.Hibernate())
        end.send(wake=engine_pb2.Wake())
        (again,) = await end.mapped()
        await images.put(again.lease_id, image)
        await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
        assert await says(end) == expected, "awake again"

        asked = asyncio.get_running_loop().create_task(says(end))
        for limit in (floor, 2 * floor) * 3:
            await at.limit("m", limit)
        assert await asked == expected, "while its limit moves"


async def test_load_of_a_model_with_other_kv_than_the_loader_found_is_refused_with_both(
    tmp_path: Path, engines: Engines
) -> None:
    folder = classes.write("Phi3ForCausalLM", tmp_path / "model")
    found = read(folder, 4).kv_bytes_per_token
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        wrong = load(at, "m", folder, context_tokens=CONTEXT, kv_bytes_per_token=2 * found)
        end.send(load=wrong)
        await end.mapped()
        failed = (await end.hear("failed")).failed
        assert failed.model_at_fault
        assert failed.reason.endswith(
            f"a token's KV takes {found} bytes of each device, and config.json makes it {2 * found}"
        )
