"""Adapters of one base in a real engine: greedy tokens are those of Transformers with the weights merged by plain
arithmetic, whatever runs in the same batch and whatever was cached before."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from loader.checkpoints.architectures import classes
from protos import common_pb2, engine_pb2
from services.runtime import tasks
from testing import small_adapters, small_checkpoints
from testing.engines.harness import KV_EXTENT, EngineEnd, Images, Node, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.shared import Engines
from tests.gpu_scheduler.engines.sglang.test_engine import move_limit

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEW = 16
FEW = 4
"""Prompts."""
FLOOR = 16 * KV_EXTENT
_TURNS = 30
NAMES = ("", "a", "b")


@pytest.fixture(scope="module")
def folders(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by name: one of all layers, one of few with a rank and a scale of another kind."""
    base, at = models["llama"], tmp_path_factory.mktemp("adapters")
    return {
        "a": small_adapters.write(base, at / "a", rank=4),
        "b": small_adapters.write(
            base, at / "b", rank=6, modules=("k_proj", "up_proj"), layers=(0, 2), seed=8, use_rslora=True
        ),
    }


@pytest.fixture(scope="module")
def merged(
    models: dict[str, Path],
    folders: dict[str, Path],
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[list[int]]]:
    """What Transformers says of the first prompts; "": the base."""
    said, at = {"": checkpoints.reference(models["llama"], prompts[:FEW], NEW)}, tmp_path_factory.mktemp("merged")
    for name, path in folders.items():
        whole = small_adapters.merged(models["llama"], path, at / name)
        said[name] = checkpoints.reference(whole, prompts[:FEW], NEW)
    assert all(said["a"][i] != said[""][i] != said["b"][i] for i in range(FEW))
    return said


@pytest.mark.parametrize("architecture", [name for name, known in classes.CLASSES.items() if known.adapters])
async def test_an_adapter_of_each_class_answers_as_merged_weights(
    tmp_path: Path, engines: Engines, prompts: list[list[int]], architecture: str
) -> None:
    folder = small_checkpoints.write(architecture, tmp_path / "model")
    path = small_adapters.write(folder, tmp_path / "a")
    whole = small_adapters.merged(folder, path, tmp_path / "merged")
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("m")
        wanted = load(at, "m", folder, context_tokens=256)
        wanted.model.adapters.CopyFrom(common_pb2.AdapterPool(slots=2, rank=4, modules=small_adapters.ALL))
        await end.hold(wanted)
        expected = [checkpoints.reference(each, prompts[:1], NEW) for each in (folder, whole)]
        assert expected[0] != expected[1]
        for of, said in zip((None, adapter("a", path)), expected, strict=True):
            end.ask(f"{of}", prompts[0], NEW, adapter=of, ignore_eos=True)
            assert [(await end.answer(f"{of}")).tokens] == said


def adapter(name: str, path: Path, generation: int = 1) -> common_pb2.Adapter:
    return common_pb2.Adapter(name=name, base="llama", path=str(path), generation=generation)


@pytest_asyncio.fixture(loop_scope="session")
async def base(
    tmp_path: Path, engines: Engines, models: dict[str, Path]
) -> AsyncIterator[tuple[Node, EngineEnd, engine_pb2.WeightsMapped]]:
    """An engine as on a GPU, with room for two adapters in a batch, or one and the base."""
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama", floor_bytes=FLOOR)
        options = {"page_size": 16, "overlap": 1, "chunked_prefill_size": 48}
        wanted = load(at, "llama", models["llama"], context_tokens=512, **options)
        wanted.model.adapters.CopyFrom(common_pb2.AdapterPool(slots=2, rank=6, modules=small_adapters.ALL))
        mapped, measured = await end.hold(wanted)
        assert measured.weights_bytes > mapped.weights_bytes, "the buffers are counted"
        yield at, end, mapped


async def test_adapters_answer_as_merged_weights_in_mixed_batches_and_after_hibernation(
    base: tuple[Node, EngineEnd, engine_pb2.WeightsMapped],
    folders: dict[str, Path],
    merged: dict[str, list[list[int]]],
    prompts: list[list[int]],
) -> None:
    at, end, mapped = base

    async def burst(tag: str, names: tuple[str, ...]) -> list[int]:
        """All prompts of all these at once; the cached tokens of each answer."""
        for i in range(FEW):
            for name in names:
                of = adapter(name, folders[name]) if name else None
                end.ask(f"{tag} {name} {i}", prompts[i], NEW, adapter=of, ignore_eos=True)
        for i in range(FEW):
            for name in names:
                answer = await end.answer(f"{tag} {name} {i}")
                assert (answer.error, answer.tokens) == ("", merged[name][i]), (tag, name, i)
        return [end.answers[f"{tag} {name} {i}"].cached_tokens for name in names for i in range(FEW)]

    images = Images(at)
    await burst("mixed", NAMES)  # three in two slots: they take turns
    for name in NAMES:  # each finds its own prefixes, and says its own all the same
        assert max(await burst("cached", (name,))) > 0
    mover = tasks.spawn(move_limit(at, end, "llama", [16, 20, 200]), "limit")
    for turn in range(_TURNS):
        await burst(f"moving {turn}", NAMES)
        if end.stats.retractions and end.stats.evicted_tokens:
            break
    await tasks.cancel(mover)
    assert end.stats.retractions and end.stats.evicted_tokens
    await at.limit("llama", 200 * KV_EXTENT)
    image = await images.take(mapped.lease_id)
    await end.do(hibernate=engine_pb2.Hibernate())
    assert await at.leased_bytes() == 0, "the buffers leave too"
    end.send(wake=engine_pb2.Wake())
    again = (await end.hear("weights_mapped")).weights_mapped
    assert again.manifest == mapped.manifest, "adapters are no part of an image"
    await images.put(again.lease_id, image)
    await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
    await burst("awake", ("b", "a", ""))
    images.close()


async def test_an_adapter_that_finds_no_place_in_the_batch_gets_one_though_others_never_pause(
    base: tuple[Node, EngineEnd, engine_pb2.WeightsMapped], folders: dict[str, Path], prompts: list[list[int]]
) -> None:
    _, end, _ = base

    async def never_pauses(name: str, number: int) -> None:
        of = adapter(name, folders[name]) if name else None
        for turn in itertools.count():
            request_id = f"{name} {number} {turn}"
            # Of different lengths, so that one always runs.
            end.ask(request_id, prompts[number], 9 + 7 * number + turn % 5, adapter=of, ignore_eos=True)
            await end.answer(request_id)

    others = [tasks.spawn(never_pauses(name, number), name) for name in ("", "a") for number in range(FEW)]
    await end.until(lambda: all(end.answers[f"{name} 0 2"].tokens for name in ("", "a")))
    end.ask("b", prompts[0], 2, adapter=adapter("b", folders["b"]), ignore_eos=True)
    assert (await end.answer("b")).finish == common_pb2.LENGTH
    await tasks.cancel(*others)


async def test_an_adapter_is_read_anew_in_another_generation_and_one_that_cannot_be_used_is_refused(
    base: tuple[Node, EngineEnd, engine_pb2.WeightsMapped],
    folders: dict[str, Path],
    merged: dict[str, list[list[int]]],
    prompts: list[list[int]],
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    _, end, _ = base

    async def ask(name: str, path: Path, generation: int = 1, i: int = 0) -> tuple[common_pb2.Finish, str, list[int]]:
        number = f"{len(end.answers)}"
        end.ask(number, prompts[i], NEW, adapter=adapter(name, path, generation), ignore_eos=True)
        answer = await end.answer(number)
        return answer.finish, answer.error, answer.tokens

    assert await ask("a", folders["a"]) == (common_pb2.LENGTH, "", merged["a"][0])
    # Its files are others now: until the catalogue says so, the engine has those that it read.
    assert await ask("a", folders["b"]) == (common_pb2.LENGTH, "", merged["a"][0])
    end.send(forget_adapter=engine_pb2.ForgetAdapter(name="a", generation=1))
    assert await ask("a", folders["b"], 2) == (common_pb2.LENGTH, "", merged["b"][0])
    # The first one is forgotten: were it asked for again, it would be read again.
    assert await ask("a", folders["b"], i=1) == (common_pb2.LENGTH, "", merged["b"][1])
    for generation in range(3, 7):  # so many that the first one leaves host memory
        assert await ask("a", folders["b"], generation) == (common_pb2.LENGTH, "", merged["b"][0])
    assert await ask("a", folders["a"], i=3) == (common_pb2.LENGTH, "", merged["a"][3])

    large = small_adapters.write(models["llama"], tmp_path / "large", rank=8)
    finish, error, _ = await ask("large", large)
    assert finish == common_pb2.FAILED and "loaded without room for adapter large" in error
    finish, error, _ = await ask("gone", tmp_path / "gone")
    assert finish == common_pb2.FAILED and "cannot be read: adapter_config.json: No such file" in error
    other = small_adapters.write(models["qwen"], tmp_path / "other")
    finish, error, _ = await ask("other", other)
    assert finish == common_pb2.BROKEN and "adapter other" in error
    broken = small_adapters.write(models["llama"], tmp_path / "broken")
    tensors = load_file(broken / small_adapters.WEIGHTS)
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, broken / small_adapters.WEIGHTS)
    finish, error, _ = await ask("broken", broken)
    assert finish == common_pb2.BROKEN and "values that are no numbers" in error
    assert await ask("b", folders["b"]) == (common_pb2.LENGTH, "", merged["b"][0])


async def test_other_requests_go_on_while_the_files_of_an_adapter_are_read(
    base: tuple[Node, EngineEnd, engine_pb2.WeightsMapped],
    folders: dict[str, Path],
    merged: dict[str, list[list[int]]],
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    _, end, _ = base
    slow = shutil.copytree(folders["a"], tmp_path / "slow")
    config = (slow / small_adapters.CONFIG).read_text()
    (slow / small_adapters.CONFIG).unlink()
    os.mkfifo(slow / small_adapters.CONFIG)  # whoever opens it waits for a writer
    for name in ("slow", "left"):
        end.ask(name, prompts[0], NEW, adapter=adapter("slow", slow), ignore_eos=True)
    end.ask("base", prompts[0], NEW, ignore_eos=True)
    assert (await end.answer("base")).tokens == merged[""][0]
    end.send(abort=engine_pb2.Abort(request_id="left"))
    assert (await end.answer("left")).finish == common_pb2.ABORTED
    (slow / small_adapters.CONFIG).write_text(config)
    assert (await end.answer("slow")).tokens == merged["a"][0]
