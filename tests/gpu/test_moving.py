"""KV of running requests goes from one engine to another by the loader's copies on a GPU. Both engines are on one
device here: which way the bytes take is the loader's own tests' matter.

Kernels are compiled when a machine first sees them: `PRISM_TEST_START_S=300` for that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from balloond.client import BalloondClient
from loader.copies.handoff_client import HandoffClient
from loader.copies.kv_copies import KvCopies
from loader.transfers import Transfers
from protos import common_pb2, engine_pb2
from services.runtime import tasks
from testing.engines import harness
from testing.engines.harness import EngineEnd
from testing.systems.local import FOLDER
from tests.balloond.conftest import Node
from tests.gpu.conftest import DEVICE, MIB
from tests.gpu.test_engine import EXTENT, FLOOR, MODEL, OPTIONS, WEIGHTS, make_prompts, one_by_one
from tests.gpu_scheduler.engines.sglang.kv.test_kv_transfer import wanted

TOKENS = 400


@contextlib.asynccontextmanager
async def two_engines(node: Node) -> AsyncIterator[tuple[EngineEnd, EngineEnd]]:
    async with harness.engine() as source, harness.engine() as target:
        at = harness.Node(BalloondClient(node.address), node.handoff, DEVICE)
        for name, end in (("source", source), ("target", target)):
            await node.book(name, weights=WEIGHTS, floor=FLOOR)
            load = harness.load(at, name, FOLDER / MODEL, context_tokens=2048, **OPTIONS)
            load.kv_extent_bytes = EXTENT
            await end.hold(load)
        await at.client.close()
        yield source, target


@contextlib.asynccontextmanager
async def copies(node: Node) -> AsyncIterator[KvCopies]:
    handoff = HandoffClient(node.handoff, answer_timeout_s=10.0)
    running = tasks.spawn(handoff.run(), "handoff")
    try:
        yield KvCopies(handoff, Transfers().of, 8 * MIB)
    finally:
        await tasks.cancel(running)


async def move(source: EngineEnd, target: EngineEnd, copying: KvCopies, live: bool) -> int:
    """Bytes."""
    source.send(export_kv=engine_pb2.ExportKv(live=live))
    places = (await source.hear("kv_places")).kv_places
    await source.hear("done")
    number = target.send(import_kv=wanted(places))
    room = (await target.hear("kv_places")).kv_places
    moved = await copying.copy(places, room)
    await target.do(imported_kv=engine_pb2.ImportedKv(command_id=number))
    return moved


async def test_requests_go_on_at_another_engine_from_their_own_kv(node):
    prompts = [prompt for prompt in make_prompts(8, 900, seed=21) if len(prompt) > 100]
    async with two_engines(node) as (source, target), copies(node) as copying:
        expected = await one_by_one(source, "undisturbed", prompts)
        names = [f"r{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            source.ask(name, prompt, TOKENS, ignore_eos=True)
        await source.until(lambda: all(source.answers[name].tokens for name in names))
        ahead = await move(source, target, copying, live=True)
        behind = await move(source, target, copying, live=False)
        assert ahead > 0 and behind < ahead
        await source.do(drain=engine_pb2.Drain())
        for name, prompt, whole in zip(names, prompts, expected, strict=True):
            left = source.answers[name]
            assert (left.finish, left.error) == (common_pb2.FAILED, "handed back")
            target.ask(name, prompt, max(1, len(whole) - len(left.tokens)), resumed=left.tokens, ignore_eos=True)
            answer = await target.answer(name)
            assert answer.cached_tokens >= (len(prompt) - 1) // 16 * 16
            said = [*left.tokens, *answer.tokens]
            assert said[: len(whole)] == whole[: len(said)]
