"""A real engine of two ranks on two devices: its tokens are Transformers' own, whatever happens to the memory of either
device meanwhile. Ranks compare what they decide by before every step here, and end where it differs."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loader.checkpoints.architectures import classes
from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import common_pb2, engine_pb2
from testing import small_checkpoints
from testing.engines.harness import (
    KV_EXTENT,
    STEP_S,
    EngineEnd,
    Images,
    Node,
    load,
    node,
    open_to_others,
)
from tests.gateway import tokenizers
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT, reference
from tests.gpu_scheduler.engines.sglang.conftest import NEW_TOKENS
from tests.gpu_scheduler.engines.sglang.grammars import SLOW
from tests.gpu_scheduler.engines.sglang.shared import Engines
from tests.gpu_scheduler.engines.sglang.test_engine import STEPS, burst
from tests.gpu_scheduler.engines.sglang.test_prompt_logprobs import Right, together

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]
FLOOR = 16 * KV_EXTENT
RESERVE = 4 * KV_EXTENT
OTHER = "cpu:1"
CAPACITY = 512 << 20
LIMITS = [16, 20, 24, 40]
"""Extents of KV that a device may have, while they move."""
TURNS = 10
"""Most times that all is asked until memory was short."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """Warm engines of two ranks each."""
    shared = Engines(ranks=2)
    yield shared
    await shared.close()


async def move_limits(at: Node, end: EngineEnd, model: str, extents: list[int]) -> None:
    """For ever, another limit every few steps, on either device."""
    chance = random.Random(3)
    while True:
        await at.limit(model, chance.choice(extents) * KV_EXTENT, chance.choice(at.devices))
        await end.steps(STEPS)


async def stay_right_while_limits_move(
    at: Node,
    end: EngineEnd,
    model: str,
    prompts: list[list[int]],
    said: list[list[int]],
    *,
    extents: list[int],
    times: int = 1,
) -> None:
    """All prompts at once, `times` over, until requests were retracted and cached tokens evicted. The limit of either
    device is one of `extents` meanwhile."""
    mover = asyncio.get_running_loop().create_task(move_limits(at, end, model, extents))
    retracted, evicted = end.stats.retractions, end.stats.evicted_tokens
    for turn in range(TURNS):
        await burst(end, f"moving-{model}-{turn}", prompts, said, times)
        if end.stats.retractions > retracted and end.stats.evicted_tokens > evicted:
            break
    mover.cancel()
    await end.until(lambda: not end.stats.running)
    assert end.stats.retractions > retracted and end.stats.evicted_tokens > evicted


async def held(at: Node, device: str) -> int:
    return next(d.leased_bytes for d in (await at.client.inspect()).devices if d.device == device)


async def limit_all(at: Node, model: str, nbytes: int) -> None:
    for device in at.devices:
        await at.limit(model, nbytes, device)


async def wake(end: EngineEnd, images: Images, parts: list[bytes]) -> list[engine_pb2.WeightsMapped]:
    end.send(wake=engine_pb2.Wake())
    mapped = await end.mapped()
    for part, rank in zip(parts, mapped, strict=True):
        await images.put(rank.lease_id, part)
    return mapped


async def load_from_images(
    end: EngineEnd,
    images: Images,
    wanted: engine_pb2.Load,
    parts: list[bytes],
    before: list[engine_pb2.WeightsMapped],
) -> None:
    """Loads a model of two ranks from its images (`parts`) alone. `before`: what its ranks mapped when these were
    taken."""
    wanted.from_image, wanted.expected_checksum = True, before[0].checksum
    wanted.others[0].expected_checksum = before[1].checksum
    end.send(load=wanted)
    new = await end.mapped()
    for part, rank in zip(parts, new, strict=True):
        await images.put(rank.lease_id, part, new=False)
    await end.do(verify=engine_pb2.Verify(command_id=new[0].command_id))


async def test_tokens_of_two_ranks_are_those_of_one_while_either_limit_moves_and_after_hibernation(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path, others={OTHER: CAPACITY}) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=FLOOR)
        images = Images(at)
        end.send(load=load(at, "qwen", models["qwen"], context_tokens=CONTEXT, chunked_prefill_size=48))
        mapped = await end.mapped()
        measured = (await end.hear("done")).done.measured
        assert [rank.rank for rank in mapped] == [0, 1] and mapped[0].lease_id != mapped[1].lease_id
        assert mapped[0].checksum != mapped[1].checksum, "each rank has its part of the weights"
        assert [rank.lease_id for rank in measured.ranks] == [rank.lease_id for rank in mapped]
        assert not open_to_others(end)
        assert measured.kv_bytes_per_token == 5 * 2 * 1 * 24 * 4, "one of two key-value heads"

        await burst(end, "alone", prompts, said["qwen"], 1)
        await together(end, "scored", Right(models["qwen"], prompts[:6], said["qwen"][:6]))
        drawn = {}
        for name in ("once", "again"):
            end.ask(name, prompts[0], 20, temperature=1.0, seed=7)
            drawn[name] = (await end.answer(name)).tokens
        assert drawn["once"] == drawn["again"]
        end.ask("among few", prompts[1], 30, temperature=1.0, top_k=3, top_p=0.9, ignore_eos=True)
        end.ask("beside it", prompts[0], 20, temperature=1.0, seed=7)
        assert (await end.answer("beside it")).tokens == drawn["once"]
        assert len((await end.answer("among few")).tokens) == 30
        end.ask("unseeded", prompts[0], 20, temperature=1.0, ignore_eos=True)
        assert (await end.answer("unseeded")).finish == common_pb2.LENGTH

        await stay_right_while_limits_move(at, end, "qwen", prompts, said["qwen"], extents=LIMITS, times=2)

        # An idle engine shrinks on both devices when the limit of the one falls that does not speak; the other may keep
        # its reserve.
        await limit_all(at, "qwen", 200 * KV_EXTENT)
        await burst(end, "wide", prompts, said["qwen"], 1)
        await at.limit("qwen", FLOOR, OTHER)
        await end.until(lambda: 0 < end.stats.kv_held_bytes <= FLOOR + RESERVE)

        parts = [await images.take(rank.lease_id) for rank in mapped]
        await end.do(hibernate=engine_pb2.Hibernate())
        assert await at.leased_bytes() == 0
        broken = bytearray(parts[1])
        broken[1000] ^= 0x40
        again = await wake(end, images, [parts[0], bytes(broken)])
        failed = await end.fail(verify=engine_pb2.Verify(command_id=again[0].command_id))
        assert "the weights do not verify" in failed.reason and failed.weights_differ and await at.leased_bytes() == 0
        again = await wake(end, images, parts)
        assert [rank.manifest for rank in again] == [rank.manifest for rank in mapped]
        await end.do(verify=engine_pb2.Verify(command_id=again[0].command_id))
        await limit_all(at, "qwen", 200 * KV_EXTENT)
        await burst(end, "awake", prompts, said["qwen"], 1)
        await end.do(unload=engine_pb2.Unload())
        assert await at.leased_bytes() == 0

        # Pages and overlapped steps, as on a GPU, in the same processes.
        await at.book("llama", floor_bytes=FLOOR)
        paged = {"page_size": 16, "overlap": 1, "chunked_prefill_size": 48, "probe_together": 3}
        folder = shutil.copytree(models["llama"], tmp_path / "llama")
        tokenizers.write(tokenizers.tiny(), folder)
        end.send(load=load(at, "llama", folder, context_tokens=CONTEXT, **paged))
        await end.mapped()
        await end.hear("done")
        await stay_right_while_limits_move(at, end, "llama", prompts, said["llama"], extents=LIMITS, times=2)

        # Grammars that are new, the same at once, and known: each rank compiles for itself, and all begin together.
        await limit_all(at, "llama", 200 * KV_EXTENT)
        for turn in range(2):
            names = {f"{word}-{turn}-{n}": word for word in ("one", "two", "three") for n in range(3)}
            for name, word in names.items():
                end.ask(name, prompts[0], 40, temperature=1.0, regex=f"{word}[0-9]{{3}}")
            for name, word in names.items():
                answer = await end.answer(name)
                assert (answer.finish, answer.error) == (common_pb2.STOP, "")
                assert re.fullmatch(f"{word}[0-9]{{3}}", tokenizers.tiny().decode(answer.tokens))
        # One that is slower with every token ends on both at the same step, whichever of them finds it out.
        end.ask("alone", prompts[0], 60, regex="[0-9]{60}")
        alone = await end.answer("alone")
        end.ask("slow", prompts[0], CONTEXT - len(prompts[0]), temperature=1.0, seed=3, ebnf=SLOW)
        end.ask("beside", prompts[0], 60, regex="[0-9]{60}")
        answer = await end.answer("slow")
        assert answer.finish == common_pb2.REJECTED and "takes too long" in answer.error
        assert (await end.answer("beside")).tokens == alone.tokens
        await end.do(unload=engine_pb2.Unload())
        assert await at.leased_bytes() == 0
        images.close()


@pytest.mark.parametrize("architecture", [name for name, known in classes.CLASSES.items() if known.latent])
async def test_latent_rows_are_the_same_on_both_ranks_and_are_not_divided(
    tmp_path: Path, engines: Engines, prompts: list[list[int]], architecture: str
) -> None:
    few = prompts[:4]
    folder = small_checkpoints.write(architecture, tmp_path / "model")
    expected = reference(folder, few, NEW_TOKENS)
    alone, half = read(folder, 4), read(folder, 4, 2)
    assert half.kv_bytes_per_token == alone.kv_bytes_per_token
    assert half.weights_bytes < 0.6 * alone.weights_bytes
    async with node(tmp_path, others={OTHER: CAPACITY}) as at, engines.one() as end:
        await at.book("m", floor_bytes=FLOOR)
        images = Images(at)
        of_both = {"context_tokens": CONTEXT, "kv_bytes_per_token": 2 * half.kv_bytes_per_token}
        wanted = load(at, "m", folder, chunked_prefill_size=48, **of_both)
        wanted.model.devices = 2
        end.send(load=wanted)
        mapped = await end.mapped()
        measured = (await end.hear("done")).done.measured
        assert measured.kv_bytes_per_token == half.kv_bytes_per_token
        assert half.weights_bytes <= measured.weights_bytes < half.weights_bytes + 2 * KV_EXTENT + (1 << 20)
        await burst(end, "alone", few, expected, 1)

        parts = [await images.take(rank.lease_id) for rank in mapped]
        await end.do(unload=engine_pb2.Unload())
        await load_from_images(end, images, wanted, parts, mapped)
        await burst(end, "from the images alone", few, expected, 1)
        images.close()


async def test_latent_rows_of_two_ranks_stay_right_while_either_limit_moves(
    tmp_path: Path, engines: Engines, prompts: list[list[int]]
) -> None:
    folder = small_checkpoints.write("DeepseekV2ForCausalLM", tmp_path / "model")
    expected = reference(folder, prompts, NEW_TOKENS)
    floor = floor_bytes(CONTEXT, 0, read(folder, 4, 2).kv, KV_EXTENT)
    async with node(tmp_path, others={OTHER: CAPACITY}) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor)
        await end.hold(load(at, "m", folder, context_tokens=CONTEXT, chunked_prefill_size=48))
        extents = [floor // KV_EXTENT + more for more in (0, 2, 4, 40)]
        await stay_right_while_limits_move(at, end, "m", prompts, expected, extents=extents)


async def test_full_device_of_two_bounds_the_engine_and_nothing_is_lost_on_the_other(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    weights = 2 << 20
    small = weights + FLOOR + 4 * KV_EXTENT
    async with node(tmp_path, others={OTHER: small}) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=FLOOR, weights_bytes=weights)
        await end.hold(load(at, "qwen", models["qwen"], context_tokens=CONTEXT))
        await burst(end, "many", prompts, said["qwen"], 3)
        await end.until(lambda: not end.stats.running)
        assert end.stats.retractions + end.stats.evicted_tokens > 0, "the small device was never full"
        await end.until(lambda: end.stats.kv_held_bytes <= small - weights + RESERVE)
        await at.until(lambda: _at_most(held(at, at.device), small + RESERVE))

        # Weights that find no room on one device are taken from neither.
        await end.do(unload=engine_pb2.Unload())
        assert await at.leased_bytes() == 0
        await at.client.set_booking(OTHER, "other", quota_bytes=0, weights_bytes=0, floor_bytes=0)
        await at.client.drop_booking(OTHER, "qwen")
        failed = await end.fail(load=load(at, "qwen", models["qwen"], context_tokens=CONTEXT))
        assert "no lease for qwen on cpu:1" in failed.reason and await at.leased_bytes() == 0
        await at.book("qwen", floor_bytes=FLOOR, weights_bytes=weights)
        await end.hold(load(at, "qwen", models["qwen"], context_tokens=CONTEXT))
        await burst(end, "after", prompts, said["qwen"], 1)

        # Asleep, each rank waits for the other alone: one that dies takes it along.
        await end.do(hibernate=engine_pb2.Hibernate())
        end.ranks[1].kill()
        async with asyncio.timeout(STEP_S):
            assert await end.ranks[0].wait() == 1
        await at.until(lambda: _at_most(at.leased_bytes(), 0))


async def _at_most(value: object, most: int) -> bool:
    return await value <= most  # type: ignore[misc]
