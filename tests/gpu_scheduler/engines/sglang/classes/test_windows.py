"""Models whose layers with a window have a KV pool of their own say what Transformers says: at once, after they slept,
and while requests are retracted, cached tokens evicted and others moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from kv_kinds.layout import KvLayout, attention, window
from protos import engine_pb2
from testing import small_checkpoints as classes
from testing.engines.harness import KV_EXTENT, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.classes.test_classes import CONTEXT, NEW_TOKENS, PROMPTS, says, stay_right
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
FLOOR = 8 * KV_EXTENT
WINDOW, CHUNK = 16, 64
OF_TOKEN, OF_TOKEN_IN_WINDOW = 2 * 1 * 64 * 2 * 4, 2 * 2 * 32 * 2 * 4
"""Bytes of a token in the layers of each kind: two layers, heads, their size, K and V, of four bytes."""
FREED_TOGETHER = 128
"""Most tokens that leave the window of a running request before SGLang frees them."""


@pytest.mark.parametrize(
    ("architecture", "form", "page_size"),
    [
        ("Gemma4ForConditionalGeneration", "", 16),  # and with pages of one token in `test_classes.py`
        ("Gemma4ForConditionalGeneration", "Gemma 4 26B-A4B", 16),
        ("Gemma4ForConditionalGeneration", "Gemma 4 E2B", 16),
        ("GptOssForCausalLM", "", 1),
        ("GptOssForCausalLM", "", 16),
    ],
)
async def test_answers_of_a_model_with_windows_of_their_own_equal_those_of_transformers(
    tmp_path: Path, engines: Engines, architecture: str, form: str, page_size: int
) -> None:
    folder = classes.write(architecture, tmp_path / "model", form)
    expected = checkpoints.reference(folder, PROMPTS, NEW_TOKENS)
    assert len({tuple(one) for one in expected}) > len(PROMPTS) // 2, "answers that are all alike show nothing"
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=FLOOR)
        options = {"context_tokens": CONTEXT, "chunked_prefill_size": CHUNK, "page_size": page_size}
        end.send(load=load(at, "m", folder, **options))
        (mapped,) = await end.mapped()
        await end.hear("done")
        assert await says(end) == expected

        await stay_right(at, end, folder, mapped, expected, FLOOR, options)


async def test_what_has_left_the_window_takes_memory_in_the_other_layers_only(tmp_path: Path, engines: Engines) -> None:
    folder = classes.write("Gemma4ForConditionalGeneration", tmp_path / "model")
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=FLOOR)
        _, measured = await end.hold(load(at, "m", folder, context_tokens=400, chunked_prefill_size=CHUNK))
        assert measured.kv_bytes_per_token == OF_TOKEN + OF_TOKEN_IN_WINDOW
        end.ask("long", list(range(10, 110)), 300, ignore_eos=True)
        assert len((await end.answer("long")).tokens) == 300
        await end.until(lambda: not end.stats.running and end.stats.kv_cached_bytes > 0)
        assert end.stats.kv_used_bytes == 0
        in_window = (end.stats.kv_cached_bytes - 399 * OF_TOKEN) // OF_TOKEN_IN_WINDOW
        # Another request may begin where a chunk of the prompt ends, so a window is kept there.
        assert WINDOW <= in_window <= 2 * WINDOW + WINDOW + FREED_TOGETHER


@pytest.mark.parametrize(("chunk", "computed"), [(256, 256), (-1, CONTEXT)])
async def test_an_engine_whose_chunks_are_longer_than_the_floor_of_a_window_counts_on_is_refused(
    tmp_path: Path, engines: Engines, chunk: int, computed: int
) -> None:
    folder = classes.write("Gemma4ForConditionalGeneration", tmp_path / "model")
    counted = KvLayout((attention(OF_TOKEN), window(OF_TOKEN_IN_WINDOW, WINDOW, FREED_TOGETHER)))
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=FLOOR)
        end.send(load=load(at, "m", folder, context_tokens=CONTEXT, chunked_prefill_size=chunk, kv=counted))
        await end.mapped()
        failed = (await end.hear("failed")).failed
        assert failed.model_at_fault
        held = WINDOW + computed + 1
        assert f"may hold {held} tokens of a window, and its floor is for {WINDOW + FREED_TOGETHER}" in failed.reason


async def test_kv_of_several_kinds_is_not_moved_and_its_requests_go_on(tmp_path: Path, engines: Engines) -> None:
    folder = classes.write("Gemma4ForConditionalGeneration", tmp_path / "model")
    (expected,) = checkpoints.reference(folder, PROMPTS[:1], NEW_TOKENS)
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m", floor_bytes=FLOOR)
        await end.hold(load(at, "m", folder, context_tokens=CONTEXT))
        end.ask("r", PROMPTS[0], NEW_TOKENS, ignore_eos=True)
        await end.steps(2)
        end.send(export_kv=engine_pb2.ExportKv(live=True))
        places = (await end.hear("kv_places")).kv_places
        await end.hear("done")
        assert not places.sequences, "nothing of it can be copied"
        sequence = engine_pb2.KvPlaces.Sequence(token_ids=PROMPTS[0])
        failed = await end.fail(import_kv=engine_pb2.ImportKv(sequences=[sequence]))
        assert failed.reason == "KV of several kinds is not moved: its requests are computed again"
        assert (await end.answer("r")).tokens == expected
