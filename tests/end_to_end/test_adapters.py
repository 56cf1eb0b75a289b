"""Adapters in the whole system with real SGLang: served by name beside their base, added and removed while it serves,
and never answering with another's prefix, wherever their base has been meanwhile."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protos import common_pb2
from services.errors import Unmet
from testing import small_adapters
from testing.systems.local import FOLDER, world
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
    async with world("sglang", models, poison=True, warm=0, placement={"rebalance": False}) as it:

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
        assert await answers("c", "org/a") == [0, 0]
        with pytest.raises(Unmet, match="base of b, c, org/a"):
            await it.placement.remove_model("base")
        await it.placement.remove_model("c")
        status, refused = await it.post("/v1/completions", {"model": "c", "prompt": prompt, "max_tokens": 1})
        assert status == 404, refused

        await it.evict("base", common_pb2.HIBERNATING)
        assert await answers("b", "base", "org/a") == [0, 0, 0]
