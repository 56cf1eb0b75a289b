"""Requests that move to an engine on another device with their KV: they say what they would have said, and compute
nothing again but the last page."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from loader.copies.handoff_client import HandoffClient
from protos import common_pb2, engine_pb2
from services.runtime import tasks
from testing import small_adapters, small_checkpoints
from testing.engines.harness import KV_EXTENT, STEP_S, EngineEnd, Node, load, node, taken_bytes
from testing.patience import PATIENCE_S
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT, reference
from tests.gpu_scheduler.engines.sglang.conftest import NEW_TOKENS, Motion
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
OTHER = "cpu:1"
FLOOR = 16 * KV_EXTENT
CAPACITY = 512 << 20
PAGE = 4
RESERVE = 80
"""Extents of the target: for all that comes and what it has yet to say. An idle engine waits half a second for what it
lacks, which is too short for a busy machine; then less comes along."""


@dataclass
class Pair:
    """Two engines of one node, each on a device of its own, with the same model, and the loader's connection."""

    at: Node
    source: EngineEnd
    target: EngineEnd
    handoff: HandoffClient

    async def copy(self, source: engine_pb2.KvPlaces, target: engine_pb2.KvPlaces, first_tokens: Sequence[int]) -> None:
        """What a loader does: the bytes of each sequence, from its first missing token on."""
        async with contextlib.AsyncExitStack() as stack:
            fds = {}
            for places in (source, target):
                ids = sorted({piece.extent_id for one in places.sequences for piece in one.pieces})
                if ids:
                    lent = await stack.enter_async_context(self.handoff.borrowed(places.lease_id, ids))
                    fds |= {extent.id: extent.fd for extent in lent}

            def read(pieces: Sequence[engine_pb2.KvPlaces.Piece]) -> bytes:
                return b"".join(os.pread(fds[one.extent_id], one.bytes, one.offset) for one in pieces)

            for left, right, first in zip(source.sequences, target.sequences, first_tokens, strict=True):
                content = memoryview(read(left.pieces))[first // source.page_tokens * source.page_bytes :]
                for piece in right.pieces:
                    os.pwrite(fds[piece.extent_id], content[: piece.bytes], piece.offset)
                    content = content[piece.bytes :]

    async def move(self, live: bool = False) -> engine_pb2.KvPlaces:
        """All that runs at the source, which is stopped unless `live`; what the target made room for."""
        self.source.send(export_kv=engine_pb2.ExportKv(live=live))
        places = (await self.source.hear("kv_places")).kv_places
        await self.source.hear("done")
        number = self.target.send(import_kv=wanted(places))
        room = (await self.target.hear("kv_places")).kv_places
        await self.copy(places, room, [one.first_token for one in room.sequences])
        await self.target.do(imported_kv=engine_pb2.ImportedKv(command_id=number))
        if not live:
            await self.source.do(drain=engine_pb2.Drain())
        return room


def wanted(places: engine_pb2.KvPlaces) -> engine_pb2.ImportKv:
    sequences = [
        engine_pb2.KvPlaces.Sequence(token_ids=one.token_ids, tokens_to_come=one.tokens_to_come, adapter=one.adapter)
        for one in places.sequences
    ]
    return engine_pb2.ImportKv(sequences=sequences, page_tokens=places.page_tokens, page_bytes=places.page_bytes)


@contextlib.asynccontextmanager
async def pair(
    folder: Path, engines: Engines, path: Path, adapters: common_pb2.AdapterPool | None = None, **others: int
) -> AsyncIterator[Pair]:
    async with node(folder, others={OTHER: CAPACITY}) as at, engines.one() as source, engines.one() as target:
        await at.book("qwen", floor_bytes=FLOOR)
        for end, device, page_size in ((source, at.device, PAGE), (target, OTHER, others.get("page_size", PAGE))):
            one = Node(at.client, at.handoff, device)
            reserve = RESERVE + 8  # the rest of a large extent that is in use does not count
            options = {"reserve_low": reserve, "reserve_high": reserve} if end is target else {}
            wanted_load = load(one, "qwen", path, context_tokens=CONTEXT, page_size=page_size, **options)
            if adapters is not None:
                wanted_load.model.adapters.CopyFrom(adapters)
            await end.hold(wanted_load)
        await at.until(lambda: has_reserve(at))
        handoff = HandoffClient(at.handoff, answer_timeout_s=STEP_S)
        running = tasks.spawn(handoff.run(), "handoff")
        try:
            yield Pair(at, source, target, handoff)
        finally:
            await tasks.cancel(running)


async def has_reserve(at: Node) -> bool:
    (device,) = [each for each in (await at.client.inspect()).devices if each.device == OTHER]
    return any(lease.kv_reserve_bytes >= RESERVE * KV_EXTENT for lease in device.leases)


async def begin(end: EngineEnd, prompts: list[list[int]], tokens: int) -> None:
    """Until every request has said so many."""
    for i, prompt in enumerate(prompts):
        end.ask(f"r{i}", prompt, NEW_TOKENS, ignore_eos=True)
    await end.until(lambda: all(len(end.answers[f"r{i}"].tokens) >= tokens for i in range(len(prompts))))


async def go_on(end: EngineEnd, name: str, prompt: list[int], so_far: list[int]) -> list[int]:
    """All that it says, there and here."""
    end.ask(name, prompt, NEW_TOKENS - len(so_far), resumed=so_far, ignore_eos=True)
    answer = await end.answer(name)
    assert answer.finish == common_pb2.LENGTH
    return [*so_far, *answer.tokens]


async def go_on_at_the_target(both: Pair, prompts: list[list[int]], said: list[list[int]]) -> None:
    """All requests begin at the source, move, and say the rest at the target, which computes only the last pages."""
    await begin(both.source, prompts, 5)
    await both.move()
    before = both.target.stats.prefill_tokens
    for i, prompt in enumerate(prompts):
        left = both.source.answers[f"r{i}"]
        if left.finish == common_pb2.LENGTH:  # it had said all before it was asked to stop
            assert left.tokens == said[i]
            continue
        assert (left.finish, left.error) == (common_pb2.FAILED, "handed back")
        assert await go_on(both.target, f"m{i}", prompt, left.tokens) == said[i]
        moved = both.target.answers[f"m{i}"]
        assert moved.prompt_tokens - moved.cached_tokens <= PAGE + 1, "all but the last page came along"
    assert both.target.stats.prefill_tokens - before <= len(prompts) * (PAGE + 1)


async def test_running_requests_moved_with_their_kv_go_on_and_compute_only_the_last_page(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        await go_on_at_the_target(both, prompts, said["qwen"])
        # The source serves nobody any more and can go.
        await both.source.do(unload=engine_pb2.Unload())


async def test_latent_rows_move_like_keys_and_values(
    tmp_path: Path, engines: Engines, prompts: list[list[int]]
) -> None:
    folder = small_checkpoints.write("DeepseekV3ForCausalLM", tmp_path / "model")
    said = reference(folder, prompts, NEW_TOKENS)
    async with pair(tmp_path, engines, folder) as both:
        await go_on_at_the_target(both, prompts, said)


async def test_moved_kv_of_an_adapter_is_found_by_requests_of_that_adapter_alone(
    tmp_path: Path, engines: Engines, models: dict[str, Path], prompts: list[list[int]], motion: Motion
) -> None:
    path = small_adapters.write(models["qwen"], tmp_path / "a", modules=("v_proj", "up_proj"))
    adapter = common_pb2.Adapter(name="a", path=str(path), generation=3)
    room = common_pb2.AdapterPool(slots=2, rank=4, modules=small_adapters.ALL)
    prompt = next(each for each in prompts if len(each) > 2 * PAGE)
    async with pair(tmp_path, engines, models["qwen"], room) as both:
        motion.slow()  # so that it has something to say yet
        both.source.ask("r0", prompt, NEW_TOKENS, adapter=adapter, ignore_eos=True)
        await both.source.until(lambda: len(both.source.answers["r0"].tokens) >= 3)
        moved = await both.move(live=True)
        motion.free()
        whole = (await both.source.answer("r0")).tokens
        assert moved.sequences
        for name, of in (("base", None), ("other", common_pb2.Adapter(name="a", path=str(path), generation=4))):
            both.target.ask(name, prompt, 1, adapter=of, ignore_eos=True)
            assert (await both.target.answer(name)).cached_tokens == 0, name
        both.target.ask("same", prompt, NEW_TOKENS, adapter=adapter, ignore_eos=True)
        answer = await both.target.answer("same")
        assert answer.tokens == whole and answer.cached_tokens >= len(prompt) // PAGE * PAGE - PAGE


async def test_kv_copied_while_requests_ran_need_not_be_copied_again(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    motion: Motion,
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        motion.slow()  # so that none is through before all has moved twice
        await begin(both.source, prompts, 3)
        ahead = await both.move(live=True)
        assert not any(both.source.answers[f"r{i}"].error for i in range(len(prompts)))
        ran = [len(both.source.answers[f"r{i}"].tokens) for i in range(len(prompts))]
        await both.source.until(lambda: any(len(both.source.answers[f"r{i}"].tokens) > n for i, n in enumerate(ran)))
        behind = await both.move()
        motion.free()
        assert ahead.sequences and behind.sequences
        assert nbytes_of(behind) < nbytes_of(ahead), "only what was said, and ends of pages"
        for i, prompt in enumerate(prompts):
            left = both.source.answers[f"r{i}"]
            if left.finish != common_pb2.LENGTH:
                assert await go_on(both.target, f"m{i}", prompt, left.tokens) == said["qwen"][i]


async def test_kv_of_generated_tokens_is_copied_while_requests_run_like_that_of_prompts(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        await begin(both.source, prompts, PAGE + 2)
        for _ in range(2):  # a second time more of each is computed, and what is kept already stays
            both.source.send(export_kv=engine_pb2.ExportKv(live=True))
            places = (await both.source.hear("kv_places")).kv_places
            await both.source.hear("done")
            for one in places.sequences:
                prompt = prompts[int(one.request_id[1:])]
                assert list(one.token_ids[: len(prompt)]) == prompt[: len(one.token_ids)]
                assert len(one.token_ids) >= (len(prompt) + PAGE + 1) // PAGE * PAGE
        await both.move()
        for i, prompt in enumerate(prompts):
            left = both.source.answers[f"r{i}"]
            if left.finish != common_pb2.LENGTH:
                assert await go_on(both.target, f"m{i}", prompt, left.tokens) == said["qwen"][i]
            else:
                assert left.tokens == said["qwen"][i]


async def test_room_for_outputs_of_moved_requests_is_kept_for_them_and_not_for_ever(
    tmp_path: Path, engines: Engines, models: dict[str, Path], prompts: list[list[int]], motion: Motion
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        motion.slow()  # so that all have something to say yet
        await begin(both.source, prompts, 3)
        both.source.send(export_kv=engine_pb2.ExportKv(live=True))
        places = (await both.source.hear("kv_places")).kv_places
        await both.source.hear("done")
        assert all(0 < one.tokens_to_come < NEW_TOKENS for one in places.sequences)
        both.target.most_taken_bytes = 0
        number = both.target.send(import_kv=wanted(places))
        room = (await both.target.hear("kv_places")).kv_places
        to_come_bytes = sum(one.tokens_to_come for one in places.sequences) // PAGE * places.page_bytes
        assert len(room.sequences) == len(prompts) and to_come_bytes > 0
        await both.target.do(imported_kv=engine_pb2.ImportedKv(command_id=number))
        await both.target.until(lambda: both.target.most_taken_bytes >= nbytes_of(room) + to_come_bytes)
        await both.target.until(lambda: taken_bytes(both.target.stats) < nbytes_of(room) + to_come_bytes)
        await both.source.do(drain=engine_pb2.Drain())


def nbytes_of(places: engine_pb2.KvPlaces) -> int:
    return sum(piece.bytes for one in places.sequences for piece in one.pieces)


async def test_kv_on_its_way_loses_no_request_and_no_new_one_starts_meanwhile(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        await begin(both.source, prompts[:2], 5)
        both.source.send(export_kv=engine_pb2.ExportKv())
        places = (await both.source.hear("kv_places")).kv_places
        await both.source.hear("done")
        both.source.ask("late", prompts[3], 4)
        assert (await both.source.answer("late")).error == "not serving"
        assert not any(both.source.answers[one.request_id].ended.is_set() for one in places.sequences)
        # A limit that falls takes nothing of what is being read.
        await both.at.limit("qwen", FLOOR)
        await both.source.until(lambda: 0 < both.source.stats.kv_held_bytes <= FLOOR)

        number = both.target.send(import_kv=wanted(places))
        room = (await both.target.hear("kv_places")).kv_places
        # While the room is empty the target serves, and its requests do not find it.
        assert await go_on(both.target, "meanwhile", prompts[0], []) == said["qwen"][0]
        await both.copy(places, room, [one.first_token for one in room.sequences])
        await both.target.do(imported_kv=engine_pb2.ImportedKv(command_id=number))
        await both.source.do(drain=engine_pb2.Drain())
        for one in places.sequences:
            i = int(one.request_id[1:])
            left = both.source.answers[one.request_id]
            assert left.error == "handed back"
            assert await go_on(both.target, f"m{i}", prompts[i], left.tokens) == said["qwen"][i]


async def test_failed_kv_move_frees_its_room_and_its_requests_begin_again(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    motion: Motion,
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        motion.slow()  # so that all run yet
        await begin(both.source, prompts[:3], 5)
        both.source.send(export_kv=engine_pb2.ExportKv())
        places = (await both.source.hear("kv_places")).kv_places
        await both.source.hear("done")
        motion.free()
        number = both.target.send(import_kv=wanted(places))
        await both.target.hear("kv_places")
        await both.target.do(imported_kv=engine_pb2.ImportedKv(command_id=number, failed=True))
        again = await both.target.fail(imported_kv=engine_pb2.ImportedKv(command_id=number))
        assert again.reason == f"no import {number} is under way"
        await both.source.do(drain=engine_pb2.Drain())
        for i in range(3):
            left = both.source.answers[f"r{i}"]
            assert left.error == "handed back"
            assert await go_on(both.target, f"m{i}", prompts[i], left.tokens) == said["qwen"][i]
        # What waits for KV when the model has to sleep waits in vain.
        number = both.target.send(import_kv=wanted(places))
        await both.target.hear("kv_places")
        await both.target.do(hibernate=engine_pb2.Hibernate())


async def test_kv_import_into_an_engine_with_other_pages_is_refused(
    tmp_path: Path, engines: Engines, models: dict[str, Path], prompts: list[list[int]]
) -> None:
    async with pair(tmp_path, engines, models["qwen"], page_size=8) as both:
        await begin(both.source, prompts[:1], 3)
        both.source.send(export_kv=engine_pb2.ExportKv())
        places = (await both.source.hear("kv_places")).kv_places
        await both.source.hear("done")
        failed = await both.target.fail(import_kv=wanted(places))
        assert failed.reason.startswith("pages of 4 tokens and ") and "do not fit those of 8 and" in failed.reason
        await asyncio.wait_for(both.source.do(drain=engine_pb2.Drain()), PATIENCE_S)


async def test_a_drain_does_not_wait_for_an_export_and_every_request_ends(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with pair(tmp_path, engines, models["qwen"]) as both:
        await begin(both.source, prompts, 2)
        number = both.source.send_together(export_kv=engine_pb2.ExportKv(), drain=engine_pb2.Drain())
        failed = (await both.source.hear("failed")).failed
        assert (failed.command_id, failed.reason) == (number, "it took too long")
        await both.source.hear("done")
        for i, prompt in enumerate(prompts):
            left = await both.source.answer(f"r{i}")
            if left.finish != common_pb2.LENGTH:
                assert left.error == "handed back"
                assert await go_on(both.target, f"m{i}", prompt, left.tokens) == said["qwen"][i]
