"""Requests with states of linear attention or of Mamba layers, beside what every class does (`test_classes.py`).

Requests go on from cached states, those of answers that stopped by themselves and of beginnings that requests share
among them; they wait for memory of their own; and KV that has states beside it stays where it is."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest

from gpu_scheduler.engines.sglang.base.options import ON_A_GPU
from loader.checkpoints.checkpoint import read
from loader.policy.floor import floor_bytes
from protos import common_pb2, engine_pb2
from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, EngineEnd, Node, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.classes.test_classes import CONTEXT, NEW_TOKENS, PROMPTS, says
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
LONG, SHARED = 512, 300
"""Tokens of a context that has room for prompts which share a beginning of so many tokens."""
BLOCK = 64
"""Most tokens of a block of the kernels of states. States within prompts are cached at the end of a block."""
PATIENT_MS = 60_000
"""Milliseconds for which a step waits for memory that may come, where cached states must not leave in its place however
slow the host is."""
of_both_kinds = pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "NemotronHForCausalLM"])


def sharing(tokens: int, count: int, first: int = 100) -> list[list[int]]:
    """`count` prompts that begin with the same `tokens`, and go on with 21 others each."""
    begin = [first + number % 89 for number in range(tokens)]
    return [[*begin, *(11 + 31 * number + more for more in range(21))] for number in range(count)]


async def served(
    at: Node,
    end: EngineEnd,
    folder: Path,
    limit_bytes: int,
    overlap: int = 1,
    context: int = CONTEXT,
    chunk: int = 64,
    **options: int,
) -> None:
    """Loads the model with this limit. `overlap`: 1 for overlapped steps, as on a GPU. `chunk`: most tokens of a
    prefill step."""
    found = read(folder, 4)
    await at.book("m", floor_bytes=floor_bytes(context, 0, found.kv, KV_EXTENT))
    await at.limit("m", limit_bytes)
    kv = found.kv.in_extents(KV_EXTENT)
    options |= {"chunked_prefill_size": chunk, "overlap": overlap}
    await end.hold(load(at, "m", folder, context_tokens=context, kv=kv, **options))


@of_both_kinds
async def test_conversation_goes_on_from_the_state_of_its_last_turn(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    (first,) = checkpoints.reference(folder, [PROMPTS[0]], NEW_TOKENS)
    longer = [*PROMPTS[0], *first, *PROMPTS[1][:20]]
    expected = checkpoints.reference(folder, [longer, longer], NEW_TOKENS)
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 64 * KV_EXTENT, soft_wait_ms=PATIENT_MS)
        end.ask("1", PROMPTS[0], NEW_TOKENS, ignore_eos=True)
        assert (await end.answer("1")).tokens == first
        for number in (2, 3):
            end.ask(f"{number}", longer, NEW_TOKENS, ignore_eos=True)
        second, third = [await end.answer(f"{number}") for number in (2, 3)]
        assert [second.tokens, third.tokens] == expected, "each has its own copy of the state"
        # The last token of an answer of a given length is not computed.
        assert second.cached_tokens == third.cached_tokens == len(PROMPTS[0]) + NEW_TOKENS - 1


@pytest.mark.parametrize("overlap", [0, 1], ids=["one after the other", "overlapped"])
@of_both_kinds
async def test_conversation_goes_on_from_the_state_of_an_answer_that_stopped_by_itself(
    tmp_path: Path, engines: Engines, architecture: str, overlap: int
) -> None:
    """With overlapped steps another step is launched before the engine knows that the answer is over: the state has the
    answer's last token then, and so has the cache."""
    folder = classes.write(architecture, tmp_path / "model")
    (whole,) = checkpoints.reference(folder, [PROMPTS[0]], NEW_TOKENS)
    last = next(number for number in range(3, NEW_TOKENS) if whole[number] not in whole[:number])
    stopped = [*PROMPTS[0], *whole[: last + 1]]
    with_stop, without = [*stopped, *PROMPTS[1][:20]], [*stopped[:-1], *PROMPTS[1][:20]]
    expected = checkpoints.reference(folder, [with_stop, without], NEW_TOKENS)
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 64 * KV_EXTENT, overlap, soft_wait_ms=PATIENT_MS)
        end.ask("first", PROMPTS[0], NEW_TOKENS, stop_token_ids=[whole[last]])
        assert (await end.answer("first")).finish == common_pb2.STOP
        end.ask("with", with_stop, NEW_TOKENS, ignore_eos=True)
        end.ask("without", without, NEW_TOKENS, ignore_eos=True)
        answers = [await end.answer(name) for name in ("with", "without")]
        assert [answer.tokens for answer in answers] == expected
        computed = len(stopped) if overlap else len(stopped) - 1
        assert [answer.cached_tokens for answer in answers] == [computed, 0 if overlap else computed]


@pytest.mark.parametrize("overlap", [0, 1], ids=["one after the other", "overlapped"])
@pytest.mark.parametrize("chunk", [512, 100])
@of_both_kinds
async def test_beginning_that_requests_share_is_computed_twice_and_not_more_often(
    tmp_path: Path, engines: Engines, architecture: str, chunk: int, overlap: int
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    prompts = sharing(SHARED, 3)
    expected = checkpoints.reference(folder, prompts, NEW_TOKENS)
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 64 * KV_EXTENT, overlap, LONG, chunk, soft_wait_ms=PATIENT_MS)
        answers = []
        for number, prompt in enumerate(prompts):
            end.ask(f"{number}", prompt, NEW_TOKENS, ignore_eos=True)
            answers.append(await end.answer(f"{number}"))
        assert [answer.tokens for answer in answers] == expected
        *first, third = [answer.cached_tokens for answer in answers]
        assert first == [0, 0] and SHARED - BLOCK < third <= SHARED


@of_both_kinds
async def test_requests_that_share_beginnings_say_the_same_while_the_limit_moves(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    chance = random.Random(1)
    prompts = [*sharing(SHARED, 5), *sharing(SHARED + BLOCK, 5, 500), *sharing(70, 4, 900)]
    expected = dict(enumerate(checkpoints.reference(folder, prompts, NEW_TOKENS)))
    floor = floor_bytes(LONG, 0, read(folder, 4).kv, KV_EXTENT)
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, floor, context=LONG, chunk=128)
        found = evicted = 0
        for turn in range(6):
            order = list(range(len(prompts)))
            chance.shuffle(order)
            for number in order:
                end.ask(f"{turn} {number}", prompts[number], NEW_TOKENS, ignore_eos=True)
            asked = [f"{turn} {number}" for number in order]
            await at.limit("m", (4 if turn % 2 == 0 else 1) * floor)
            answers = [await end.answer(name) for name in asked]
            assert {number: answer.tokens for number, answer in zip(order, answers, strict=True)} == expected
            found += sum(SHARED - BLOCK < answer.cached_tokens <= SHARED + BLOCK for answer in answers)
            evicted = end.stats.evicted_tokens
        # At four times the floor there is memory for further states.
        assert found > 0 and evicted > 0
        await end.until(lambda: not end.stats.running)
        await end.do(hibernate=engine_pb2.Hibernate())

        async def nothing_is_leased() -> bool:
            return await at.leased_bytes() == 0

        # An extent that was requested while the limit moved may come now, and goes back at once.
        await at.until(nothing_is_leased)


@of_both_kinds
async def test_requests_without_memory_for_a_state_wait_for_that_of_others(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    floor = floor_bytes(CONTEXT, 0, read(folder, 4).kv, KV_EXTENT)
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, floor)
        for _ in range(3):
            assert await says(end) == expected
        # Beside the padding's there is room for a state and the tokens of a longest request: never for all requests.
        assert 0 < end.most_taken_bytes <= floor < 2 * KV_EXTENT * len(PROMPTS)


@of_both_kinds
async def test_models_with_states_are_served_with_the_options_that_engines_have_on_gpus(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    """Pages of one token, whatever the options say, overlapped steps, and the probe's requests together."""
    folder = classes.write(architecture, tmp_path / "model")
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    found = read(folder, 4)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=floor_bytes(CONTEXT, 0, found.kv, KV_EXTENT))
        await at.limit("m", 64 * KV_EXTENT)
        kv = found.kv.in_extents(KV_EXTENT)
        await end.hold(load(at, "m", folder, context_tokens=CONTEXT, kv=kv, **{**ON_A_GPU, "read_threads": 0}))
        assert await says(end) == expected


@of_both_kinds
async def test_idle_model_that_hibernates_keeps_neither_tokens_nor_states(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 64 * KV_EXTENT)
        await says(end)
        await end.until(lambda: not end.stats.running and end.stats.kv_cached_bytes > 0)
        states = 2 * KV_EXTENT
        assert end.stats.kv_cached_bytes >= len(PROMPTS) * states, "states count as cached"
        await end.do(hibernate=engine_pb2.Hibernate())
        assert await at.leased_bytes() == 0


@of_both_kinds
async def test_kv_with_states_beside_it_is_neither_given_nor_taken(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    expected = checkpoints.reference(folder, PROMPTS[:1], NEW_TOKENS)
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 64 * KV_EXTENT)
        end.ask("1", PROMPTS[0], NEW_TOKENS, ignore_eos=True)
        end.send(export_kv=engine_pb2.ExportKv(live=True))
        places = (await end.hear("kv_places")).kv_places
        assert not places.sequences
        await end.hear("done")
        assert [(await end.answer("1")).tokens] == expected, "it was not stopped"
        wanted = engine_pb2.ImportKv(page_tokens=1, page_bytes=512)
        wanted.sequences.add(token_ids=PROMPTS[1])
        failed = await end.fail(import_kv=wanted)
        assert "computed again" in failed.reason and not failed.model_at_fault


@of_both_kinds
async def test_requests_that_come_together_begin_together_where_all_states_are_cached(
    tmp_path: Path, engines: Engines, architecture: str
) -> None:
    folder = classes.write(architecture, tmp_path / "model")
    together, rounds = 4, 20
    async with node(tmp_path) as at, engines.one() as end:
        await served(at, end, folder, 16 * KV_EXTENT)
        steps = [await _steps_of(end, f"{number}", number, together) for number in range(rounds)]
        assert end.stats.evicted_tokens > 0, "the cache is full"
        # The first of them may begin before the others have come.
        assert median(steps[rounds // 2 :]) < together


async def _steps_of(end: EngineEnd, name: str, seed: int, count: int) -> int:
    """Number of steps in which `count` short prompts, of which none begins like another, had their only token."""
    before = end.told
    for number in range(count):
        end.ask(f"{name} {number}", [7 + seed * count + number] * 9, 1, ignore_eos=True)
    for number in range(count):
        await end.answer(f"{name} {number}")
    return end.told - before
