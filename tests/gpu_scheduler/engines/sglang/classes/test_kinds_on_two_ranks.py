"""Models that keep more than keys and values of every token, on an engine of two ranks: windows and states divide by
their heads, and answers stay those of Transformers while the memory of either device comes and goes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from balloond.backends.cpu import CpuMapper
from balloond.driver.connection.lease import Lease
from balloond.driver.kv.range import ElasticRange
from kv_kinds import messages
from loader.checkpoints.architectures import classes
from loader.checkpoints.checkpoint import Checkpoint, read
from loader.policy.floor import floor_bytes
from protos import engine_pb2
from testing import small_checkpoints
from testing.engines.harness import KV_EXTENT, STEP_S, EngineEnd, Images, Node, load, node
from tests.gpu_scheduler.engines.sglang.checkpoints import reference
from tests.gpu_scheduler.engines.sglang.classes.test_classes import (
    CONTEXT,
    NEW_TOKENS,
    PROMPTS,
    TABLES,
    VISION_TABLE,
    WEIGHTS_EXTENT,
    of_engine,
    says,
)
from tests.gpu_scheduler.engines.sglang.classes.test_states import BLOCK, LONG, SHARED, sharing
from tests.gpu_scheduler.engines.sglang.shared import Engines
from tests.gpu_scheduler.engines.sglang.test_tensor_parallel import (
    CAPACITY,
    OTHER,
    limit_all,
    load_from_images,
    move_limits,
    wake,
)

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]
OF_SEVERAL_KINDS = [
    ("Gemma4ForConditionalGeneration", "Gemma 4 26B-A4B"),
    ("Qwen3NextForCausalLM", ""),
    ("Qwen3_5MoeForConditionalGeneration", ""),
]
"""Classes and forms with experts that keep more than keys and values of every token. Some without experts have a
neighbour on one device."""
TURNS = 30
"""Most times that all is asked until memory was short."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """Warm engines of two ranks each."""
    shared = Engines(ranks=2)
    yield shared
    await shared.close()


def of_two_ranks(
    at: Node, folder: Path, context: int = CONTEXT, **options: Any
) -> tuple[engine_pb2.Load, Checkpoint, int]:
    """A Load of a model on two devices, what the loader says of its part on one, and its floor there."""
    half = read(folder, 4, 2)
    kv = half.kv.in_extents(KV_EXTENT)
    wanted = load(at, "m", folder, context_tokens=context, kv=kv.times(2), chunked_prefill_size=48, **options)
    wanted.model.devices = 2
    return wanted, half, floor_bytes(context, 0, half.kv, KV_EXTENT)


def tables_of(architecture: str) -> int:
    """Most bytes of the tables that engines make beside the weights."""
    return VISION_TABLE if classes.CLASSES[architecture].wrapper else TABLES


async def stays_right_while_limits_move(at: Node, end: EngineEnd, floor: int, expected: list[list[int]]) -> None:
    """Asks until requests were retracted and cached tokens evicted, while either limit moves."""
    mover = asyncio.get_running_loop().create_task(
        move_limits(at, end, "m", [times * floor // KV_EXTENT for times in (1, 2, 4)])
    )
    before = end.stats.retractions
    for _ in range(TURNS):
        assert await says(end) == expected, "while its limits move"
        if end.stats.retractions > before and end.stats.evicted_tokens:
            break
    mover.cancel()
    assert end.stats.retractions > before and end.stats.evicted_tokens > 0
    await end.until(lambda: not end.stats.running)
    await limit_all(at, "m", 4 * floor)


@pytest.mark.parametrize(("architecture", "form"), OF_SEVERAL_KINDS)
async def test_windows_and_states_divide_by_their_heads_and_answers_are_those_of_one_device(
    tmp_path: Path, engines: Engines, architecture: str, form: str
) -> None:
    folder = small_checkpoints.write(architecture, tmp_path / "model", form)
    expected = reference(folder, PROMPTS, NEW_TOKENS)
    async with node(tmp_path, others={OTHER: CAPACITY}) as at, engines.one() as end:
        wanted, half, floor = of_two_ranks(at, folder)
        await at.book("m", floor_bytes=floor)
        images = Images(at)
        end.send(load=wanted)
        mapped = await end.mapped()
        measured = (await end.hear("done")).done.measured
        assert messages.layout(measured) == of_engine(half.kv.in_extents(KV_EXTENT))
        most = half.weights_bytes + tables_of(architecture) + WEIGHTS_EXTENT
        assert half.weights_bytes <= measured.weights_bytes < most
        assert await says(end) == expected
        await stays_right_while_limits_move(at, end, floor, expected)

        parts = [await images.take(rank.lease_id) for rank in mapped]
        await end.do(hibernate=engine_pb2.Hibernate())
        assert await at.leased_bytes() == 0
        again = await wake(end, images, parts)
        await end.do(verify=engine_pb2.Verify(command_id=again[0].command_id))
        assert await says(end) == expected, "awake again"
        await end.do(unload=engine_pb2.Unload())
        assert await at.leased_bytes() == 0

        # With overlapped steps, as on a GPU, and with pages, which models with states do not have.
        wanted, _, _ = of_two_ranks(at, folder, page_size=16, overlap=1)
        await load_from_images(end, images, wanted, parts, mapped)
        await stays_right_while_limits_move(at, end, floor, expected)
        images.close()


async def test_state_behind_a_shared_beginning_is_cached_on_both_devices(tmp_path: Path, engines: Engines) -> None:
    folder = small_checkpoints.write("Qwen3_5ForCausalLM", tmp_path / "model")
    prompts = sharing(SHARED, 3)
    expected = reference(folder, prompts, NEW_TOKENS)
    async with node(tmp_path, others={OTHER: CAPACITY}) as at, engines.one() as end:
        wanted, _, floor = of_two_ranks(at, folder, LONG, overlap=1)
        await at.book("m", floor_bytes=floor)
        await limit_all(at, "m", 4 * floor)
        await end.hold(wanted)
        answers = []
        for number, prompt in enumerate(prompts):
            end.ask(f"{number}", prompt, NEW_TOKENS, ignore_eos=True)
            answers.append(await end.answer(f"{number}"))
        assert [answer.tokens for answer in answers] == expected
        assert answers[1].cached_tokens == 0 and SHARED - BLOCK < answers[2].cached_tokens <= SHARED


class Neighbour:
    """A lease on one device, whose memory comes and goes. The lease uses all of its memory, so none of it is taken."""

    def __init__(self, at: Node, device: str) -> None:
        self._lease = Lease.attach(at.handoff, device, "neighbour", timeout_s=STEP_S)
        self._held: list[int] = []
        self._range = ElasticRange(
            self._lease, CpuMapper(), span_bytes=1 << 30, extent_bytes=KV_EXTENT, low=0, high=0, large=1
        )

    def hold(self, extents: int) -> None:
        """Has so many extents, or as many as it can."""
        if (more := extents - len(self._held)) > 0:
            self._held += self._range.acquire(more, timeout_s=1.0)
        else:
            self._range.release(self._held[extents:])
            del self._held[extents:]
        self._range.take_reclaims()
        self._range.reclaimed()
        self._range.usage(len(self._held) * KV_EXTENT, [])

    def close(self) -> None:
        self._range.close()
        self._lease.detach()


async def come_and_go(neighbour: Neighbour, end: EngineEnd, most: int) -> None:
    """For ever, a neighbour with another number of extents every few steps, all of `most` every other time."""
    chance = random.Random(3)
    while True:
        for extents in (most, chance.randrange(most)):
            await asyncio.to_thread(neighbour.hold, extents)
            await end.steps(3)


@pytest.mark.parametrize("architecture", ["Gemma4ForConditionalGeneration", "Qwen3_5ForCausalLM"])
async def test_memory_that_a_neighbour_takes_on_one_device_leaves_windows_and_states_of_both(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = small_checkpoints.write(architecture, tmp_path / "model")
    expected = reference(folder, PROMPTS, NEW_TOKENS)
    half = read(folder, 4, 2)
    weights = -(-(half.weights_bytes + tables_of(architecture)) // WEIGHTS_EXTENT) * WEIGHTS_EXTENT
    floor = floor_bytes(CONTEXT, 0, half.kv, KV_EXTENT)
    shared = 40 * KV_EXTENT
    async with node(tmp_path, others={OTHER: weights + floor + shared}) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor, weights_bytes=weights)
        await at.client.set_booking(OTHER, "neighbour", quota_bytes=0, weights_bytes=0, floor_bytes=0)
        wanted, _, _ = of_two_ranks(at, folder)
        _, measured = await end.hold(wanted)
        assert messages.layout(measured) == of_engine(half.kv.in_extents(KV_EXTENT))
        neighbour = Neighbour(at, OTHER)
        goes = asyncio.get_running_loop().create_task(come_and_go(neighbour, end, shared // KV_EXTENT))
        for _ in range(TURNS):
            assert await says(end) == expected, "while a neighbour of one rank takes memory"
            if end.stats.retractions + end.stats.evicted_tokens:
                break
        assert not goes.done() and end.stats.retractions + end.stats.evicted_tokens > 0
        goes.cancel()
        await end.until(lambda: not end.stats.running)
        await end.do(unload=engine_pb2.Unload())
        neighbour.close()
        assert await at.leased_bytes() == 0


async def test_state_of_another_size_than_the_loader_found_is_refused_with_the_bytes_of_a_device(
    tmp_path: Path, engines: Engines
) -> None:
    folder = small_checkpoints.write("Qwen3_5ForCausalLM", tmp_path / "model")
    async with node(tmp_path, others={OTHER: CAPACITY}) as at, engines.one() as end:
        wanted, half, floor = of_two_ranks(at, folder)
        await at.book("m", floor_bytes=floor)
        (state,) = (kind for kind in wanted.model.kv_kinds if kind.states)
        state.bytes_per_state += 2 * KV_EXTENT
        end.send(load=wanted)
        await end.mapped()
        failed = (await end.hear("failed")).failed
        assert failed.model_at_fault and await at.leased_bytes() == 0
        (real,) = (kind.bytes_per_state for kind in half.kv.in_extents(KV_EXTENT).kinds if kind.states)
        told = f"a state takes {real} bytes of each device, and config.json makes it {real + KV_EXTENT}"
        assert failed.reason.endswith(told)
