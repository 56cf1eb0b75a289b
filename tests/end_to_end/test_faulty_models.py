"""Models that cannot be served, beside one that can."""

import json
import shutil

import pytest

from protos import common_pb2
from services.errors import PrismError
from tests.end_to_end.world import FOLDER, MODELS, world

GOOD = MODELS[1]


@pytest.fixture
def broken(tmp_path):
    """A truncated checkpoint, one whose config lies about a tensor, and one without a tokenizer."""
    folders = {}
    for name in ("truncated", "tensorless", "wordless"):
        folders[name] = tmp_path / name
        shutil.copytree(FOLDER / GOOD, folders[name])
    weights = folders["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    config = json.loads((folders["tensorless"] / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folders["tensorless"] / "config.json").write_text(json.dumps(config))
    (folders["wordless"] / "tokenizer.json").unlink()
    return folders


async def test_broken_checkpoints_and_a_model_too_large_are_in_error_with_their_reasons_and_the_rest_serves(broken):
    models = {name: {"path": str(path)} for name, path in broken.items()} | {GOOD: {}}
    models["huge"] = {"path": str(FOLDER / GOOD), "quota_bytes": 1 << 40}
    async with world("echo", models) as it:
        await it.complete(GOOD, [5, 6, 7], 4)

        async def active():
            _, listed = await it.get("/v1/models")
            states = {model["id"]: model for model in listed["data"]}
            return states if states[GOOD]["residency"] == "active" else None

        states = await it.until(active, f"{GOOD} never was listed as active")
        assert not states[GOOD]["error"]
        for name, words in {
            "truncated": ["model.safetensors"],
            "tensorless": ["layers.6"],
            "wordless": ["tokenizer"],
            "huge": ["engine quota 1,099,511,627,776", "the largest group"],
        }.items():
            assert states[name]["residency"] == "error", name
            for word in words:
                assert word in states[name]["error"], states[name]["error"]
            status, answer = await it.post("/v1/completions", {"model": name, "prompt": [5], "max_tokens": 1})
            assert status == 503 and answer["error"]["code"] == "model_error", answer

        # Added while it runs: the same checks.
        for name, path in (("later", broken["truncated"]), ("nowhere", broken["truncated"] / "none")):
            with pytest.raises(PrismError):
                await it.placement.add_model(common_pb2.ModelListing(name=name, path=str(path)))
        await it.placement.add_model(common_pb2.ModelListing(name="added", path=str(FOLDER / MODELS[0])))

        async def listed_now() -> bool:
            return (await it.get("/v1/models/added"))[0] == 200

        await it.until(listed_now, "an added model never was listed")
