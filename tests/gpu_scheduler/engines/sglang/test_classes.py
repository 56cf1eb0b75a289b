"""Every model class that is served says what Transformers says: from files, from its image after it slept and as a new
model, and while requests are retracted, cached tokens evicted and others moved."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import engine_pb2
from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, EngineEnd, Images, Node, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEW_TOKENS, CONTEXT = 12, 128
WEIGHTS_EXTENT = 1 << 20
"""Bytes that a node of tests hands weights out in."""
_TURNS = 30
PROMPTS = [checkpoints.prompts(12)[number] for number in (0, 1, 2, 4, 5, 6, 9)]
"""Of 31 to 110 tokens, longer than the windows; one begins like the one before it. Together they need twice the
floor."""


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
    assert len({tuple(one) for one in expected}) > len(PROMPTS) // 2, "answers that are all alike show nothing"
    found = read(folder, 4)
    floor = floor_bytes(CONTEXT, 0, found.kv_bytes_per_token, KV_EXTENT)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor)
        images = Images(at)
        options = {
            "context_tokens": CONTEXT,
            "kv_bytes_per_token": found.kv_bytes_per_token,
            "chunked_prefill_size": 64,
        }
        end.send(load=load(at, "m", folder, **options))
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

        await take_memory_away(at, end, floor, expected)

        await end.do(unload=engine_pb2.Unload())
        end.send(load=load(at, "m", folder, **options, from_image=True, expected_checksum=mapped.checksum))
        (new,) = await end.mapped()
        assert new.manifest == mapped.manifest
        await images.put(new.lease_id, image, new=False)  # tables that no checkpoint has are there already
        await end.do(verify=engine_pb2.Verify(command_id=new.command_id))
        assert await says(end) == expected, "from the image alone"


async def take_memory_away(at: Node, end: EngineEnd, floor: int, expected: list[list[int]]) -> None:
    """Asks while the limit moves until requests were retracted, tokens evicted and moved; answers stay right."""
    chance = random.Random(3)
    for _ in range(_TURNS):
        asked = asyncio.get_running_loop().create_task(says(end))
        while not asked.done():
            await at.limit("m", chance.choice((floor, 4 * floor)))
            await end.steps(3)
        assert await asked == expected, "while its limit moves"
        await end.until(lambda: not end.stats.running)
        if min(counted := (end.stats.retractions, end.stats.evicted_tokens, end.stats.moved_tokens)):
            return
    raise AssertionError(f"not all happened: {counted} retractions, tokens evicted, moved")


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
