"""The echo engine's memory on a real balloond, with several kinds of KV."""

import asyncio
from pathlib import Path

from gpu_scheduler.engines.echo.leased import LeasedMemory
from kv_kinds import messages
from kv_kinds.layout import KvLayout, attention, state, window
from loader.policy.floor import floor_bytes
from protos import engine_pb2
from testing.engines.harness import KV_EXTENT, load, node

CONTEXT = 2000
LAYOUT = KvLayout((attention(1024), window(2048, 256, 64), state(KV_EXTENT + 1, 2)))


def extents(layout: KvLayout, tokens: int) -> int:
    return sum(-(-kind.bytes_of(tokens) // KV_EXTENT) for kind in layout.kinds)


async def test_request_of_several_kinds_of_kv_holds_extents_of_each_and_a_floor_holds_the_longest(
    tmp_path: Path,
) -> None:
    context, layout = CONTEXT, LAYOUT.in_extents(KV_EXTENT)
    floor = floor_bytes(context, 0, LAYOUT, KV_EXTENT)
    async with node(tmp_path) as at:
        await at.book("m", floor_bytes=floor)
        message = load(at, "m", tmp_path, context_tokens=context, weights_bytes=1 << 16)
        message.model.kv_kinds.extend(messages.kinds(layout))
        memory = await asyncio.to_thread(LeasedMemory, message)
        try:
            await asyncio.to_thread(memory.map_weights, True)
            memory.start_kv()
            await at.limit("m", floor)

            async def used(request_id: str, tokens: int) -> int | None:
                if not await asyncio.to_thread(memory.fit, request_id, tokens):
                    return None
                stats = engine_pb2.EngineStats()
                memory.describe(stats)
                return stats.kv_used_bytes // KV_EXTENT

            assert await used("a", 1) == 4 + 1 + 1, "two states of two extents, and one each for a token's other KV"
            assert await used("a", context) == extents(layout, context) <= floor // KV_EXTENT
            assert await used("b", context) is None, "above the limit"
            memory.free("b")
            memory.free("a")

            async def has_room() -> bool:
                return await used("b", context) is not None

            await at.until(has_room)
            assert await used("b", context) == extents(layout, context)
        finally:
            await asyncio.to_thread(memory.close)
