"""Adapters of one base in a real engine: greedy tokens equal those of Transformers with the weights merged, whatever
runs beside them and whatever was cached before."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import common_pb2, engine_pb2
from testing import small_adapters
from testing.engines.harness import Images, load, node
from tests.gpu_scheduler.engines.sglang import checkpoints
from tests.gpu_scheduler.engines.sglang.conftest import NEW_TOKENS
from tests.gpu_scheduler.engines.sglang.shared import Engines

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]


async def test_adapters(
    tmp_path: Path, engines: Engines, models: dict[str, Path], prompts: list[list[int]], said
) -> None:
    base = models["llama"]
    a = small_adapters.write(base, tmp_path / "a", rank=4)
    b = small_adapters.write(base, tmp_path / "b", rank=6, modules=("q_proj", "down_proj"), seed=8, use_rslora=True)
    want = {"": said["llama"]}
    for name, path in (("a", a), ("b", b)):
        want[name] = checkpoints.reference(
            small_adapters.merged(base, path, tmp_path / f"m{name}"), prompts, NEW_TOKENS
        )
    assert want["a"] != want[""] != want["b"]
    told = {
        name: common_pb2.Adapter(name=name, base="llama", path=str(path), generation=1)
        for name, path in (("a", a), ("b", b))
    }
    async with node(tmp_path) as at, engines.one() as end:
        await at.book("llama")
        images = Images(at)
        wanted = load(at, "llama", base, context_tokens=512)
        wanted.model.adapters.CopyFrom(common_pb2.AdapterPool(slots=3, rank=6, modules=small_adapters.ALL))
        mapped, measured = await end.hold(wanted)
        print(measured)
        for turn in range(2):
            for name in ("", "a", "b"):
                for i, prompt in enumerate(prompts):
                    end.ask(f"{turn}-{name}-{i}", prompt, NEW_TOKENS, adapter=told.get(name), ignore_eos=True)
            for name in ("", "a", "b"):
                for i in range(len(prompts)):
                    answer = await end.answer(f"{turn}-{name}-{i}")
                    assert answer.error == ""
                    assert answer.tokens == want[name][i], (turn, name, i)
        image = await images.take(mapped.lease_id)
        await end.do(hibernate=engine_pb2.Hibernate())
        assert await at.leased_bytes() == 0
        end.send(wake=engine_pb2.Wake())
        again = (await end.hear("weights_mapped")).weights_mapped
        await images.put(again.lease_id, image)
        await end.do(verify=engine_pb2.Verify(command_id=again.command_id))
        for name in ("b", "", "a"):
            end.ask(f"awake-{name}", prompts[0], NEW_TOKENS, adapter=told.get(name), ignore_eos=True)
            assert (await end.answer(f"awake-{name}")).tokens == want[name][0]
            assert (await end.answer(f"awake-{name}")).cached_tokens == 0
        images.close()
