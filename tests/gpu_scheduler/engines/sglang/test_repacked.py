"""Layers that SGLang lays out anew once their weights are read (`repacked.py`): answers, images, missing tensors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from protos import engine_pb2
from testing.engines.harness import KV_EXTENT, EngineEnd, Images, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints, repacked
from tests.gpu_scheduler.engines.sglang.checkpoints import CONTEXT
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
NEW_TOKENS = 12
LIMITS = (16 * KV_EXTENT, 40 * KV_EXTENT) * 3
PROMPTS = checkpoints.prompts(4)
WEIGHTS_EXTENT = 64 << 10
"""So small that the range is longer for some extents while layers are laid out anew."""


@dataclass(frozen=True)
class Written:
    folder: Path
    expected: list[list[int]]
    """Tokens that Transformers says with the same weights as floats."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("repacked")
    repacked.write(folder / "model", folder / "plain")
    expected = checkpoints.reference(folder / "plain", PROMPTS, NEW_TOKENS)
    assert len({tuple(one) for one in expected}) == len(PROMPTS), "answers that are all alike show nothing"
    return Written(folder / "model", expected)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def repacking() -> AsyncIterator[Engines]:
    """Engines that know the method."""
    shared = Engines(module="tests.gpu_scheduler.engines.sglang.repacking")
    yield shared
    await shared.close()


async def says(end: EngineEnd) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        end.ask(f"{number}", prompt, NEW_TOKENS, ignore_eos=True)
    said = [(await end.answer(f"{number}")).tokens for number in range(len(PROMPTS))]
    end.answers.clear()
    return said


async def test_repacked_weights_answer_the_same_from_files_from_their_image_and_in_another_process(
    tmp_path: Path, repacking: Engines, written: Written
) -> None:
    async with node(tmp_path) as at, repacking.one() as end, repacking.one() as other:
        images = Images(at)
        await at.book("m", floor_bytes=LIMITS[0])
        from_files = load(at, "m", written.folder, context_tokens=CONTEXT)
        from_files.weights_extent_bytes = WEIGHTS_EXTENT
        mapped, measured = await end.hold(from_files)
        assert await says(end) == written.expected
        manifest = engine_pb2.Manifest.FromString(mapped.manifest)
        check_layout(manifest, measured.weights_bytes)

        granted = [event.detail for event in await at.client.events() if event.what == "granted"]
        extents = sum(int(detail.split(" x ")[0]) for detail in granted if detail.endswith("of weights"))
        assert extents * WEIGHTS_EXTENT > measured.weights_bytes, "layers took places behind the model"
        image = await images.take(mapped.lease_id)
        assert len(image) == measured.weights_bytes, "those behind the model went back"
        await end.do(hibernate=engine_pb2.Hibernate())
        end.send(wake=engine_pb2.Wake())
        (again,) = await end.mapped()
        assert again.manifest == mapped.manifest
        await images.put(again.lease_id, image)
        await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
        assert await says(end) == written.expected, "awake again"

        asked = asyncio.get_running_loop().create_task(says(end))
        for limit in LIMITS:
            await at.limit("m", limit)
        assert await asked == written.expected, "while its limit moves"

        await at.book("other", floor_bytes=LIMITS[0])
        from_image = load(
            at, "other", written.folder, context_tokens=CONTEXT, from_image=True, expected_checksum=mapped.checksum
        )
        from_image.weights_extent_bytes = WEIGHTS_EXTENT
        other.send(load=from_image)
        (filling,) = await other.mapped()
        assert filling.manifest == mapped.manifest
        await images.put(filling.lease_id, image, new=False)
        await other.do(verify=engine_pb2.Verify(command_id=filling.command_id))
        assert await says(other) == written.expected, "from an image"
        images.close()


def check_layout(manifest: engine_pb2.Manifest, weights_bytes: int) -> None:
    """The range has what was made of the weights, without gaps, and nothing of what it was made of."""
    layer = "model.layers.0.self_attn.o_proj."
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    kept = {name.removeprefix(layer) for name in tensors if name.startswith(layer)}
    assert kept == {"turned", "weight_scale", "halves", "quant_method.packed.scales"}
    assert list(tensors[layer + "turned"].shape) == [64, 128, 2]
    scalars = {f"model.layers.{number}.self_attn.attn.{name}_float": f"{value}"
               for number in range(3) for name, value in repacked.KV_SCALES.items()}  # fmt: skip
    assert dict(manifest.scalars) == scalars
    items = {"int8": 1, "float32": 4}
    end = 0
    for tensor in sorted(manifest.tensors, key=lambda each: each.offset_bytes):
        assert end <= tensor.offset_bytes < end + 256, tensor.name
        end = tensor.offset_bytes + items[tensor.dtype] * math.prod(tensor.shape)
    assert manifest.total_bytes == weights_bytes == -(-end // WEIGHTS_EXTENT) * WEIGHTS_EXTENT


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ("model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"),
        ("model.layers.2.self_attn.v_proj.weight", "model.layers.2.self_attn.qkv_proj.weight"),
    ],
)
async def test_a_checkpoint_that_lacks_a_quantised_weight_is_refused_by_its_name(
    tmp_path: Path, repacking: Engines, written: Written, lacks: str, named: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(written.folder / "config.json")
    weights = load_file(written.folder / "model.safetensors")
    del weights[lacks]
    save_file(weights, folder / "model.safetensors")
    async with node(tmp_path) as at, repacking.one() as end:
        await at.book("m", floor_bytes=LIMITS[0])
        failed = await end.fail(load=load(at, "m", folder, context_tokens=CONTEXT))
        assert failed.model_at_fault
        assert failed.reason.endswith(f"the checkpoint does not set 1 of the model's parameters: {named}")
