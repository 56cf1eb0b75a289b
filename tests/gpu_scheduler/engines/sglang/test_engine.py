"""A real engine on a real balloond: its tokens are Transformers' own, whatever happens to its memory meanwhile.

New memory is NaN here, and SGLang recounts its pool after every step, so neither a wrong slot nor a lost one passes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import warnings
from pathlib import Path

import pytest

from protos import common_pb2, engine_pb2
from testing import small_checkpoints
from testing.engines.harness import KV_EXTENT, STEP_S, EngineEnd, Images, Node, load, node, open_to_others
from tests.gpu_scheduler.engines.sglang import checkpoints, embedded
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.conftest import NEW_TOKENS, Motion
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
FLOOR = 16 * KV_EXTENT
STEPS = 10
"""For which a limit holds that moves: on a slow machine as on a fast one."""


async def burst(
    end: EngineEnd, tag: str, prompts: list[list[int]], said: list[list[int]], times: int, **sampling: float
) -> None:
    """All prompts at once, `times` over; every answer must be what is `said` of it."""
    names = {f"{tag}-{time}-{i}": i for time in range(times) for i in range(len(prompts))}
    for name, i in names.items():
        end.ask(name, prompts[i], NEW_TOKENS, ignore_eos=True, **sampling)
    for name, i in names.items():
        answer = await end.answer(name)
        assert (answer.finish, answer.error, answer.parked) == (common_pb2.LENGTH, "", False), name
        assert answer.tokens == said[i], name
        assert answer.prompt_tokens == len(prompts[i])


async def found_again(end: EngineEnd, prompts: list[list[int]], said: list[list[int]], cached: int) -> None:
    """Asks again until so much of the first prompt was cached. Where balloond gives memory later than an engine waits
    for it, on a busy machine, the engine evicts what it had cached."""
    async with asyncio.timeout(STEP_S):
        for turn in itertools.count():
            await burst(end, f"cached-{turn}", prompts, said, 1)
            if end.answers[f"cached-{turn}-0-0"].cached_tokens == cached:
                return


async def move_limit(at: Node, end: EngineEnd, model: str, extents: list[int], seed: int = 3) -> None:
    """For ever, another limit every few steps."""
    chance = random.Random(seed)
    while True:
        await at.limit(model, chance.choice(extents) * KV_EXTENT)
        await end.steps(STEPS)


async def test_tokens_equal_transformers_while_limits_move_and_after_hibernation(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=FLOOR)
        images = Images(at)
        mapped, measured = await end.hold(
            load(at, "qwen", models["qwen"], context_tokens=CONTEXT, chunked_prefill_size=48)
        )
        assert measured.kv_bytes_per_token == 5 * 2 * 2 * 24 * 4 and measured.context_tokens == CONTEXT
        assert measured.prefill_tokens_per_s > 0 and measured.decode_step_ms > 0
        assert not open_to_others(end), "torch's process groups would meet at a port of all interfaces"
        await end.until(lambda: end.stats.forward_steps > 0)
        assert not end.stats.prefill_tokens and not end.stats.decode_tokens, "nobody has asked it anything"

        await burst(end, "alone", prompts, said["qwen"], 1)
        await found_again(end, prompts, said["qwen"], len(prompts[0]) - 1)

        for i, prompt in enumerate(prompts):
            end.ask(f"penalized-{i}", prompt, NEW_TOKENS, ignore_eos=True, frequency_penalty=0.9)
        penalized = [(await end.answer(f"penalized-{i}")).tokens for i in range(len(prompts))]
        assert all(mine != plain for mine, plain in zip(penalized, said["qwen"], strict=True))

        # A long prompt is computed in steps; the second time all of it but the last token is there.
        long = [2 + i % 1000 for i in range(200)]
        for name in ("long", "long again"):
            end.ask(name, long, 1, ignore_eos=True)
            await end.answer(name)
        assert end.answers["long"].prefilled == [(0, 48), (0, 96), (0, 144), (0, 192)]
        assert end.answers["long again"].prefilled == [(199, 0)]

        mover = asyncio.get_running_loop().create_task(move_limit(at, end, "qwen", [16, 20, 24, 40, 200]))
        await burst(end, "moving", prompts, said["qwen"], 2)
        await burst(end, "moving-penalized", prompts, penalized, 1, frequency_penalty=0.9)
        mover.cancel()
        await end.until(lambda: not end.stats.running)
        assert end.stats.retractions > 0 and end.stats.evicted_tokens > 0
        assert sum(len(answer.retracted) for answer in end.answers.values()) == end.stats.retractions

        # What is left of their prefixes is moved together once nothing runs, and is still what it was.
        await at.limit("qwen", 200 * KV_EXTENT)
        for turn in range(20):
            if end.stats.moved_tokens:
                break
            mover = asyncio.get_running_loop().create_task(move_limit(at, end, "qwen", [24, 32, 40, 200], seed=turn))
            await burst(end, f"scattered-{turn}", prompts, said["qwen"], 1 + turn % 4)
            mover.cancel()
            await end.until(lambda: not end.stats.running)
        assert end.stats.moved_tokens > 0
        await at.limit("qwen", 200 * KV_EXTENT)
        await burst(end, "moved", prompts, said["qwen"], 1)
        assert any(end.answers[f"moved-0-{i}"].cached_tokens for i in range(len(prompts)))

        # An idle engine shrinks under a lowered limit without being asked.
        await at.limit("qwen", FLOOR)
        await end.until(lambda: 0 < end.stats.kv_held_bytes <= FLOOR)

        image = await images.take(mapped.lease_id)
        for turn in range(2):
            await end.do(hibernate=engine_pb2.Hibernate())
            await at.until(lambda: _is(at.leased_bytes(), 0))
            end.send(wake=engine_pb2.Wake())
            again = (await end.hear("weights_mapped")).weights_mapped
            assert again.lease_id == mapped.lease_id and again.manifest == mapped.manifest
            await images.put(again.lease_id, image)
            await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
            await at.limit("qwen", 200 * KV_EXTENT)
            await burst(end, f"awake-{turn}", prompts, said["qwen"], 1)
        await end.until(lambda: end.stats.hibernations == 2)
        assert end.stats.forward_steps > 0 and end.stats.prefill_tokens > 0 and end.stats.decode_tokens > 0
        images.close()


async def test_tokens_equal_transformers_with_pages_and_overlapped_steps_as_on_a_gpu(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=FLOOR)
        images = Images(at)
        paged = {"page_size": 16, "overlap": 1, "chunked_prefill_size": 48, "probe_together": 3}
        asked = load(at, "qwen", models["qwen"], context_tokens=CONTEXT, **paged)
        # All of the model is less than one extent of weights, as a small one is there.
        asked.model.weights_bytes = sum(file.stat().st_size for file in models["qwen"].glob("*.safetensors"))
        asked.weights_extent_bytes = 4 * asked.model.weights_bytes // (1 << 20) * (1 << 20) or 1 << 20
        mapped, measured = await end.hold(asked)
        assert measured.kv_bytes_per_token == 5 * 2 * 2 * 24 * 4
        await burst(end, "alone", prompts, said["qwen"], 1)
        await found_again(end, prompts, said["qwen"], (len(prompts[0]) - 1) // 16 * 16)
        mover = asyncio.get_running_loop().create_task(move_limit(at, end, "qwen", [16, 20, 24, 40, 200]))
        await burst(end, "moving", prompts, said["qwen"], 2)
        mover.cancel()
        await end.until(lambda: not end.stats.running)
        assert end.stats.retractions > 0 and end.stats.evicted_tokens > 0
        await at.limit("qwen", FLOOR)
        await end.until(lambda: 0 < end.stats.kv_held_bytes <= FLOOR)

        image = await images.take(mapped.lease_id)
        await end.do(hibernate=engine_pb2.Hibernate())
        await at.until(lambda: _is(at.leased_bytes(), 0))
        end.send(wake=engine_pb2.Wake())
        again = (await end.hear("weights_mapped")).weights_mapped
        await images.put(again.lease_id, image)
        await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
        await burst(end, "awake", prompts, said["qwen"], 1)
        images.close()


async def test_tokens_equal_transformers_on_extents_of_two_sizes_while_limits_move(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    """Long prompts grow the pool by much at once, so that what follows lies on large extents, and beside them."""
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=FLOOR)
        options = {"page_size": 16, "chunked_prefill_size": 128, "large_extent": 2}
        await end.hold(load(at, "qwen", models["qwen"], context_tokens=CONTEXT, **options))
        for turn in range(3):
            await at.limit("qwen", 200 * KV_EXTENT)
            for number in range(3):
                long = [2 + (7 * turn + 3 * number + i) % 1000 for i in range(450)]
                end.ask(f"long-{turn}-{number}", long, 1, ignore_eos=True)
                assert (await end.answer(f"long-{turn}-{number}")).finish == common_pb2.LENGTH
            mover = asyncio.get_running_loop().create_task(move_limit(at, end, "qwen", [16, 20, 24, 40, 200]))
            await burst(end, f"moving-{turn}", prompts, said["qwen"], 1)
            mover.cancel()
            await end.until(lambda: not end.stats.running)
        granted = [event.detail for event in await at.client.events() if event.what == "granted"]
        sizes = {detail.split(" x ")[1] for detail in granted if detail.endswith("of kv")}
        assert sizes == {f"{KV_EXTENT} bytes of kv", f"{2 * KV_EXTENT} bytes of kv"}
        assert end.stats.evicted_tokens > 0 and end.stats.retractions > 0
        await at.limit("qwen", FLOOR)
        await end.until(lambda: 0 < end.stats.kv_held_bytes <= FLOOR)
        await end.do(hibernate=engine_pb2.Hibernate())
        await at.until(lambda: _is(at.leased_bytes(), 0))


TURNS = 5
"""Which pages are next to which, and how far the rest is by then, is the machine's to say: not each time does something
have to move."""


async def scatter(end: EngineEnd, motion: Motion, tag: str, prompts: list[list[int]]) -> None:
    """Between the pages of each prompt that goes on are pages of some that have ended: hardly an extent is without
    either. Those that go on are slow, so that what comes now comes before they are through."""
    motion.slow(0.05)
    shorts = [f"short-{tag}-{i}-{other}" for i in range(len(prompts)) for other in range(8)]
    for i, prompt in enumerate(prompts):
        for other in range(8):
            end.ask(shorts[8 * i + other], [3, 5 + i, 7 + other, *map(ord, tag)], 8, ignore_eos=True)
        end.ask(f"long-{tag}-{i}", prompt, NEW_TOKENS, ignore_eos=True)
    for name in shorts:
        await end.answer(name)
    motion.slow()


def extents_of(prompts: list[list[int]], token_bytes: int) -> int:
    """That they need to the end, by their pages."""
    tokens = sum(len(prompt) + NEW_TOKENS + 4 for prompt in prompts)
    return -(-tokens * token_bytes // KV_EXTENT)


async def test_running_requests_are_moved_together_when_their_limit_falls_and_none_is_retracted(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    motion: Motion,
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("qwen", floor_bytes=KV_EXTENT)
        options = {"page_size": 4, "overlap": 1, "reserve_low": 0, "reserve_high": 0}
        _, measured = await end.hold(load(at, "qwen", models["qwen"], context_tokens=CONTEXT, **options))
        retracted = []
        for turn in range(TURNS):
            await at.limit("qwen", 200 * KV_EXTENT)
            await scatter(end, motion, f"limit {turn}", prompts[:4])
            left = (extents_of(prompts[:4], measured.kv_bytes_per_token) + 2) * KV_EXTENT
            await at.limit("qwen", left)
            await end.until(lambda left=left: end.stats.kv_limit_bytes <= left)
            motion.free()
            for i in range(4):
                assert (await end.answer(f"long-limit {turn}-{i}")).tokens == said["qwen"][i]
            of_turn = {name: answer.retracted for name, answer in end.answers.items() if f" {turn}-" in name}
            retracted.append({name: reasons for name, reasons in of_turn.items() if reasons})
        await end.until(lambda: not end.stats.running)
        assert end.stats.moved_tokens > 0
        # On a crowded machine all four were retracted in one turn, twice in some hundred runs; why is not known yet.
        assert sum(map(bool, retracted)) <= 1, retracted
        if any(retracted):
            warnings.warn(f"requests were retracted that could have been moved: {retracted}", stacklevel=1)


async def test_prefixes_cached_between_running_requests_pages_make_room_for_another_model(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
    motion: Motion,
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        for name in ("qwen", "other"):
            await at.book(name, floor_bytes=KV_EXTENT)
        options = {"page_size": 4, "overlap": 1, "reserve_low": 0, "reserve_high": 0}
        _, measured = await end.hold(load(at, "qwen", models["qwen"], context_tokens=CONTEXT, **options))
        await at.limit("qwen", 200 * KV_EXTENT)
        for turn in range(TURNS):
            await scatter(end, motion, f"asked {turn}", prompts[:4])
            (device,) = (await at.client.inspect()).devices
            stays = extents_of(prompts[:4], measured.kv_bytes_per_token) + 3
            wanted = device.free_bytes + device.leases[0].kv_bytes - stays * KV_EXTENT

            async def there(wanted: int = wanted) -> bool:
                """A loaded machine's engine may not answer in the time that balloond gives it."""
                room = await at.client.make_room(
                    at.device, "other", bytes=wanted, may_retract=False, hold_ms=0, timeout_s=20.0
                )
                return room.short_bytes == 0

            before = end.stats.moved_tokens

            def moved(before: int = before) -> bool:
                return end.stats.moved_tokens > before

            def one_is_through(turn: int = turn) -> bool:
                return any(end.answers[f"long-asked {turn}-{i}"].finish for i in range(4))

            await at.until(there)
            await end.until(lambda: moved() or one_is_through())
            moved_while_all_ran = moved() and not one_is_through()
            motion.free()
            for i in range(4):
                assert (await end.answer(f"long-asked {turn}-{i}")).tokens == said["qwen"][i]
            await end.until(lambda: not end.stats.running)
            if moved_while_all_ran:
                break
        assert (end.stats.retractions, moved_while_all_ran) == (0, True)


async def _is(value: object, expected: int) -> bool:
    return await value == expected  # type: ignore[misc]


async def test_models_of_two_shapes_in_turn_from_disk_and_from_an_image(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        images = Images(at)
        taken: dict[str, tuple[bytes, engine_pb2.WeightsMapped]] = {}
        first_of = {name: engine_pb2.EngineStats() for name in ("llama", "qwen")}
        for name in ("llama", "qwen"):
            await at.book(name)
            mapped, _ = await end.hold(load(at, name, models[name], context_tokens=CONTEXT))
            await burst(end, f"{name}-disk", prompts, said[name], 1)
            await end.until(lambda: not end.stats.running)
            first_of[name].CopyFrom(end.stats)
            taken[name] = await images.take(mapped.lease_id), mapped
            await end.do(unload=engine_pb2.Unload())
            assert await at.leased_bytes() == 0
        assert len(taken["llama"][0]) == taken["llama"][1].weights_bytes

        # A load that is given up before its weights came.
        end.send(load=load(at, "llama", models["llama"], context_tokens=CONTEXT, from_image=True))
        begun = (await end.hear("weights_mapped")).weights_mapped
        failed = await end.fail(unload=engine_pb2.Unload())
        assert failed.command_id == begun.command_id and "unloaded" in failed.reason
        await end.hear("done")

        for name in ("llama", "qwen"):
            image, first = taken[name]
            end.send(
                load=load(
                    at, name, models[name], context_tokens=CONTEXT, from_image=True, expected_checksum=first.checksum
                )
            )
            mapped = (await end.hear("weights_mapped")).weights_mapped
            assert mapped.manifest == first.manifest
            await images.put(mapped.lease_id, image)
            await end.do(verify=engine_pb2.Verify(command_id=mapped.command_id))
            await burst(end, f"{name}-image", prompts, said[name], 1)
            # Nothing of the models before: placement would take it for what this one is asked for.
            await end.until(lambda: not end.stats.running)
            assert 0 < end.stats.prefill_tokens < 2 * first_of[name].prefill_tokens
            assert 0 < end.stats.decode_tokens < 2 * first_of[name].decode_tokens
            await end.do(unload=engine_pb2.Unload())
        images.close()


async def test_a_wake_up_with_wrong_weights_is_refused_and_leaves_nothing_mapped(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        images = Images(at)
        mapped, _ = await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT))
        image = await images.take(mapped.lease_id)
        await end.do(hibernate=engine_pb2.Hibernate())

        broken = bytearray(image)
        broken[1000] ^= 0x40
        end.send(wake=engine_pb2.Wake())
        again = (await end.hear("weights_mapped")).weights_mapped
        await images.put(again.lease_id, bytes(broken))
        failed = await end.fail(verify=engine_pb2.Verify(command_id=again.command_id))
        assert "do not verify" in failed.reason and failed.weights_differ and not failed.model_at_fault
        await at.until(lambda: _is(at.leased_bytes(), 0))

        end.send(wake=engine_pb2.Wake())
        again = (await end.hear("weights_mapped")).weights_mapped
        await images.put(again.lease_id, image)
        await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
        await burst(end, "right", prompts, said["llama"], 1)

        # An image that is not the one that was announced.
        await end.do(unload=engine_pb2.Unload())
        end.send(
            load=load(
                at,
                "llama",
                models["llama"],
                context_tokens=CONTEXT,
                from_image=True,
                expected_checksum="rows:00000000",
            )
        )
        mapped = (await end.hear("weights_mapped")).weights_mapped
        await images.put(mapped.lease_id, image)
        failed = await end.fail(verify=engine_pb2.Verify(command_id=mapped.command_id))
        assert "instead of rows:00000000" in failed.reason and failed.weights_differ
        assert await at.leased_bytes() == 0
        assert "is warm" in (await end.fail(wake=engine_pb2.Wake())).reason
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT))
        images.close()


async def test_embeddings_equal_transformers_and_text_is_made_in_between(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    model = checkpoints.embedder(tmp_path / "embedder")
    async with node(tmp_path) as at, engines.one() as end:
        vectors = embedded.expected(model, prompts)
        await embedded.story(at, end, model, vectors, (models["llama"], prompts[0], said["llama"][0]))


async def test_model_at_whose_first_request_sglang_fails_is_refused_with_the_reason_and_the_engine_serves_another(
    tmp_path: Path,
    engines: Engines,
    models: dict[str, Path],
    prompts: list[list[int]],
    said: dict[str, list[list[int]]],
) -> None:
    """SGLang makes no embeddings with this class, and finds that out as it computes the first one."""
    folder = small_checkpoints.write("DeepseekV3ForCausalLM", tmp_path / "model")
    async with node(tmp_path) as at, engines.one() as end:
        for name in ("m", "llama"):
            await at.book(name)
        command_id = end.send(load=load(at, "m", folder, context_tokens=CONTEXT, embedding=128))
        await end.hear("weights_mapped")
        failed = (await end.hear("failed")).failed
        assert failed.command_id == command_id and failed.model_at_fault and "get_embedding" in failed.reason
        await at.until(lambda: _is(at.leased_bytes(), 0))
        await end.hold(load(at, "llama", models["llama"], context_tokens=CONTEXT))
        await burst(end, "after", prompts[:2], said["llama"], 1)
