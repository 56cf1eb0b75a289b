"""Every model class that is served says what Transformers says: from files, from its image after it slept and as a new
model, and while requests are retracted, cached tokens evicted and others moved."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_scheduler.engines.sglang.kv.engine_kv import FREED_TOGETHER
from kv_kinds import messages
from kv_kinds.layout import KvLayout
from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import common_pb2, engine_pb2
from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, EngineEnd, Images, Node, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEW_TOKENS, CONTEXT = 12, 128
WEIGHTS_EXTENT = 1 << 20
"""Bytes that a node of tests hands weights out in."""
TABLES = 1 << 17
"""Most bytes of the tables of rotary embeddings, which lie with the weights and no checkpoint has."""
FURTHEST_OFF = 1 << 17
FAR_OFF = ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
"""Classes of which engines on CPUs lay out more bytes than the loader expects, up to FURTHEST_OFF. Of the others it is
a quarter of that at most, which is less than a table."""
VISION_TABLE = 8192 * 16 * 4
"""Most bytes of the table of rotary embeddings of a small model's part for images: SGLang makes it for as many
positions, whatever the model."""
_TURNS = 30
PROMPTS = [checkpoints.prompts(12)[number] for number in (0, 1, 2, 4, 5, 6, 9)]
"""Of 31 to 110 tokens, longer than the windows; one begins like the one before it. Together they need twice the
floor."""


def of_engine(kv: KvLayout) -> KvLayout:
    """The kinds of a model, with what this file's engines hold beyond a window; the loader does not know their
    options."""
    beyond = FREED_TOGETHER + 1  # longer than a chunk; pages are of one token
    return KvLayout(tuple(replace(each, beyond_window_tokens=beyond if each.window_tokens else 0) for each in kv.kinds))


async def says(end: EngineEnd) -> list[list[int]]:
    """The answers to PROMPTS, all asked at once. None is handed back, since the floor has room for any of them."""
    for number, prompt in enumerate(PROMPTS):
        end.ask(f"{number}", prompt, NEW_TOKENS, ignore_eos=True)
    said = []
    for number in range(len(PROMPTS)):
        answer = await end.answer(f"{number}")
        assert (answer.finish, answer.error, answer.parked) == (common_pb2.LENGTH, "", False), number
        said.append(answer.tokens)
    end.answers.clear()
    return said


@pytest.mark.parametrize(
    ("architecture", "form"),
    [
        *((architecture, "") for architecture in classes.CLASSES),
        *((architecture, form) for architecture, forms in classes.FORMS.items() for form in forms),
    ],
)
async def test_answers_of_a_class_equal_those_of_transformers(
    tmp_path: Path, engines: Engines, architecture: str, form: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model", form)
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    assert len({tuple(one) for one in expected}) > len(PROMPTS) // 2, "answers that are all alike show nothing"
    found = read(folder, 4)
    floor = floor_bytes(CONTEXT, 0, found.kv, KV_EXTENT)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor)
        options = {
            "context_tokens": CONTEXT,
            "kv": found.kv.in_extents(KV_EXTENT),
            "chunked_prefill_size": 64,
            # As on a GPU; other classes have overlapped steps in tests of their own.
            "overlap": int(any(kind.states for kind in found.kv.kinds)),
        }
        end.send(load=load(at, "m", folder, **options))
        (mapped,) = await end.mapped()
        measured = (await end.hear("done")).done.measured
        assert measured.kv_bytes_per_token == found.kv_bytes_per_token
        assert messages.layout(measured) == of_engine(found.kv).in_extents(KV_EXTENT)
        held = found.held_bytes(CONTEXT)
        beside = VISION_TABLE if "vision_config" in classes.CLASSES[architecture].changes else 0
        assert held <= measured.weights_bytes < held + beside + WEIGHTS_EXTENT
        off = FURTHEST_OFF if architecture in FAR_OFF else FURTHEST_OFF // 4
        assert abs(checkpoints.laid_out(mapped.manifest) - held) <= off
        assert await says(end) == expected

        await stay_right(at, end, folder, mapped, expected, floor, options)


async def stay_right(
    at: Node,
    end: EngineEnd,
    folder: Path,
    mapped: engine_pb2.WeightsMapped,
    expected: list[list[int]],
    floor: int,
    options: dict[str, Any],
) -> None:
    """Fails unless a loaded model goes on with the `expected` answers: after a hibernation, while memory is taken away,
    and as a new model from its image alone. `mapped`: its weights as the first load, with these `options`, told."""
    images = Images(at)
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
