"""Adapters in the whole system with real SGLang: served by name beside their base, added and removed while it serves,
and never answering with another's prefix, wherever their base has been meanwhile."""

import asyncio
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protos import common_pb2
from services.errors import Unmet
from services.runtime import tasks
from testing import small_adapters
from testing.systems.local import FOLDER, lists, world
from tests.end_to_end.reference import greedy

pytestmark = pytest.mark.sglang
BASE = FOLDER / "llama-debian"
TEXT = "Note that the value of the variable is not changed when the file is opened, and so"
NEW = 24


async def test_adapters_are_served_by_name_and_keep_their_prefixes_apart(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    prompt = tokenizer(TEXT, add_special_tokens=False).input_ids
    adapters = {
        "org/a": small_adapters.write(BASE, tmp_path / "a", rank=4),
        "b": small_adapters.write(BASE, tmp_path / "b", rank=6, modules=("q_proj", "down_proj"), seed=8),
        "c": small_adapters.write(BASE, tmp_path / "c", rank=8, seed=9),
    }
    said = {}
    for name, path in {"base": BASE, **adapters}.items():
        merged = BASE if name == "base" else small_adapters.merged(BASE, path, tmp_path / f"merged-{path.name}")
        (tokens,) = await greedy(merged, [prompt], NEW)
        said[name] = tokenizer.decode(tokens, skip_special_tokens=True)
    assert len({*said.values()}) == 4
    models = {"base": {"path": str(BASE)}}
    models |= {name: {"path": str(adapters[name]), "base": "base"} for name in ("org/a", "b")}
    devices = dict.fromkeys(("cpu:0", "cpu:1"), 32 << 20)
    async with world("sglang", models, devices=devices, poison=True, warm=0, placement={"rebalance": False}) as it:

        async def answers(*names: str) -> list[int]:
            """Cached tokens of each answer, which must be what Transformers says."""
            cached = []
            for name in names:
                text, usage, _ = await it.stream(name, prompt, NEW)
                assert text == said[name], name
                cached.append(usage["prompt_tokens_details"]["cached_tokens"])
            return cached

        _, cards = await it.get("/v1/models")
        assert {card["id"]: card["parent"] for card in cards["data"]} == {"base": None, "org/a": "base", "b": "base"}
        assert await answers("base", "org/a", "b") == [0, 0, 0]
        assert min(await answers("b", "org/a", "base")) > 0

        await it.placement.add_model(common_pb2.ModelListing(name="c", path=str(adapters["c"]), base="base"))
        await it.until(lambda: lists(it.http, it.base, ["c"]), "the gateway does not hear of it")
        assert await answers("c", "org/a") == [0, 0]
        with pytest.raises(Unmet, match="base of b, c, org/a"):
            await it.placement.remove_model("base")
        await it.placement.remove_model("c")

        async def unknown() -> bool:
            status, _ = await it.post("/v1/completions", {"model": "c", "prompt": prompt, "max_tokens": 1})
            return status == 404

        await it.until(unknown, "it is served after it was removed")

        await it.evict("base", common_pb2.HIBERNATING)
        assert await answers("b", "base", "org/a") == [0, 0, 0]

        # Streams of all three go on, each as itself, while their base moves to the other group.
        names = ("base", "org/a", "b")
        started = [asyncio.Event() for _ in names]
        running = [
            tasks.spawn(it.stream(name, prompt, NEW, began), name) for name, began in zip(names, started, strict=True)
        ]
        await asyncio.gather(*(began.wait() for began in started))
        here = await it.resident("base")
        assert here is not None
        await it.migrate("base", next(group for group in it.local.group_names if group != here[0]))
        assert [text for text, _, _ in await asyncio.gather(*running)] == [said[name] for name in names]
        assert await answers(*names), "each is itself there, too"
