"""What an engine of embeddings is asked in a test: for vectors that Transformers makes, alone and together, in parts,
asleep and awake, in little memory, and in a process that makes text in between."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from protos import common_pb2, engine_pb2
from testing.engines.harness import KV_EXTENT, STEP_S, EngineEnd, Images, Node, load
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT

DIMENSIONS = 96
LONG = [2 + 7 * number % 1000 for number in range(CONTEXT)]
FLOOR = 24 * KV_EXTENT
"""Of one prompt of the context: 512 tokens of 1,536 bytes are 12 extents."""
Vectors = list[tuple[list[int], list[float]]]


def expected(model: Path, prompts: list[list[int]]) -> Vectors:
    """Prompts, the last as long as the context, with their vectors."""
    asked = [*prompts, LONG]
    return list(zip(asked, checkpoints.embeddings(model, asked), strict=True))


async def all_right(end: EngineEnd, tag: str, vectors: Vectors) -> int:
    """All at once; how many tokens were cached."""
    for number, (prompt, _) in enumerate(vectors):
        end.embed(f"{tag}-{number}", prompt)
    cached = 0
    for number, (prompt, wanted) in enumerate(vectors):
        answer = await end.answer(f"{tag}-{number}")
        assert (answer.finish, answer.error, answer.tokens) == (common_pb2.STOP, "", [])
        assert answer.embedding == pytest.approx(wanted, abs=1e-3), f"{tag} {number}"
        assert answer.prompt_tokens == len(prompt)
        cached += answer.cached_tokens
    return cached


async def found_again(end: EngineEnd, tag: str, vectors: Vectors) -> None:
    """Asks again until much was cached. Where balloond gives memory later than an engine waits for it, on a busy
    machine, the engine evicts what it had cached."""
    async with asyncio.timeout(STEP_S):
        for turn in itertools.count():
            if await all_right(end, f"{tag} {turn}", vectors) > len(LONG) // 2:
                return


async def sleeps_and_wakes(end: EngineEnd, images: Images, lease_id: str) -> None:
    image = await images.take(lease_id)
    await end.do(hibernate=engine_pb2.Hibernate())
    end.send(wake=engine_pb2.Wake())
    awake = (await end.hear("weights_mapped")).weights_mapped
    await images.put(awake.lease_id, image)
    await end.do(verify=engine_pb2.Verify(command_id=awake.command_id))


async def generates(end: EngineEnd, at: Node, path: Path, prompt: list[int], expected: list[int]) -> None:
    """Another model in the same process, which makes text."""
    await at.book("llama")
    await end.hold(load(at, "llama", path, context_tokens=CONTEXT))
    end.ask("text", prompt, len(expected), ignore_eos=True)
    assert (await end.answer("text")).tokens == expected
    end.embed("no vector", prompt)
    answer = await end.answer("no vector")
    assert (answer.finish, answer.error) == (common_pb2.REJECTED, "the model makes text")
    end.answers.clear()
    await end.do(unload=engine_pb2.Unload())


async def story(
    at: Node, end: EngineEnd, model: Path, vectors: Vectors, text: tuple[Path, list[int], list[int]]
) -> None:
    """`text`: another model, a prompt, and what it says."""
    await at.book("e", floor_bytes=FLOOR)
    images = Images(at)
    # Pages and overlapped steps are as on a GPU.
    gpu = {"page_size": 16, "overlap": 1}
    await end.hold(load(at, "e", model, context_tokens=CONTEXT, embedding=DIMENSIONS, **gpu))
    await all_right(end, "pages", vectors)
    await found_again(end, "cached pages", vectors)
    await end.do(unload=engine_pb2.Unload())

    await generates(end, at, *text)

    given = load(at, "e", model, context_tokens=CONTEXT, embedding=DIMENSIONS, chunked_prefill_size=32)
    mapped, measured = await end.hold(given)
    assert measured.prefill_tokens_per_s > 0 and measured.context_tokens == CONTEXT

    end.embed("alone", vectors[0][0])
    assert (await end.answer("alone")).embedding == pytest.approx(vectors[0][1], abs=1e-3)
    await all_right(end, "together", vectors)
    await found_again(end, "cached", vectors)

    for name, prompt in (("none", []), ("too long", [*LONG, 5]), ("unknown", [checkpoints.VOCABULARY])):
        end.embed(name, prompt)
        assert (await end.answer(name)).finish == common_pb2.REJECTED, name
    end.ask("no text", [5, 6], 5)
    answer = await end.answer("no text")
    assert (answer.finish, answer.error) == (common_pb2.REJECTED, "the model makes embeddings")

    # One is given up in the middle of its prompt, unless it was faster; nothing of it stays.
    end.embed("given up", LONG[::-1])
    await end.until(lambda: bool(end.answers["given up"].prefilled))
    end.send(abort=engine_pb2.Abort(request_id="given up"))
    answer = await end.answer("given up")
    assert (answer.finish == common_pb2.ABORTED) == (not answer.embedding), answer

    # In as little memory as it may have, and asleep in between.
    await at.limit("e", FLOOR)
    await all_right(end, "little memory", vectors)
    await sleeps_and_wakes(end, images, mapped.lease_id)
    await all_right(end, "awake", vectors)

    # It leaves: what waits is handed back, and its KV does not go along.
    refused = await end.fail(export_kv=engine_pb2.ExportKv())
    assert "no KV worth while" in refused.reason
    for number, (prompt, _) in enumerate(vectors):
        end.embed(f"last-{number}", prompt[::-1])
    await end.do(drain=engine_pb2.Drain())
    ends = {(await end.answer(f"last-{number}")).finish for number in range(len(vectors))}
    assert ends <= {common_pb2.STOP, common_pb2.FAILED}
    images.close()
    await end.do(unload=engine_pb2.Unload())
