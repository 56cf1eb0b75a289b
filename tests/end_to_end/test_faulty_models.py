"""Models that cannot be served, beside one that can."""

import json
import shutil

import pytest

from protos import common_pb2, placement_pb2
from services.errors import PrismError
from testing.systems.local import FOLDER, MODELS, world

GOOD = MODELS[1]


@pytest.fixture
def broken(tmp_path):
    """A truncated checkpoint, one whose config lies about a tensor, one without a tokenizer, and two whose files are
    whole, but whose chat template does not compile and whose tokenizer is read as another."""
    folders = {}
    for name in ("truncated", "tensorless", "wordless", "speechless", "misread"):
        folders[name] = tmp_path / name
        shutil.copytree(FOLDER / ("llama-debian" if name == "misread" else GOOD), folders[name])
    weights = folders["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    config = json.loads((folders["tensorless"] / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (folders["tensorless"] / "config.json").write_text(json.dumps(config))
    (folders["wordless"] / "tokenizer.json").unlink()
    for name, changes in (
        ("speechless", {"chat_template": "{% for m in messages %}"}),
        ("misread", {"tokenizer_class": "GemmaTokenizer"}),
    ):
        settings = folders[name] / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | changes))
    return folders


async def test_broken_and_too_large_models_are_in_error_with_reasons_and_the_rest_serves(broken):
    models = {name: {"path": str(path)} for name, path in broken.items()} | {GOOD: {}}
    models["huge"] = {"path": str(FOLDER / GOOD), "quota_bytes": 1 << 40}
    async with world("echo", models) as it:
        await it.complete(GOOD, [5, 6, 7], 4)

        async def active():
            _, listed = await it.get("/v1/models")
            states = {model["id"]: model for model in listed["data"]}
            tried = all(states[name]["error"] for name in broken)  # tokenizers are tried while others are served
            return states if tried and states[GOOD]["residency"] == "active" else None

        states = await it.until(active, f"{GOOD} never was listed as active")
        assert not states[GOOD]["error"]
        for name, words in {
            "truncated": ["model.safetensors"],
            "tensorless": ["layers.6"],
            "wordless": ["tokenizer"],
            "speechless": ["chat template does not compile"],
            "misread": ["where tokenizer.json says"],
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


@pytest.fixture
def volume(tmp_path):
    """A folder with a model in it, which may go away and come back."""
    shutil.copytree(FOLDER / GOOD, tmp_path / "volume" / "m")
    return tmp_path / "volume"


async def asked(it, model):
    """(status, error, Retry-After) of a request, which names no path of the server."""
    body = {"model": model, "prompt": [5, 6], "max_tokens": 2}
    async with it.http.post(it.base + "/v1/completions", json=body) as answer:
        told = await answer.json()
        error = told.get("error", {}).get("message", "")
        assert str(it.local.catalogue.parent) not in error and "/volume" not in error, error
        return answer.status, error, answer.headers.get("retry-after")


async def told_of(it, model) -> placement_pb2.Route:
    return next(route for route in (await it.placement.routes()).routes if route.model.name == model)


async def test_volume_that_is_away_for_a_moment_fails_only_requests_of_that_moment(volume):
    async with world("echo", {"m": {"path": str(volume / "m")}, GOOD: {}}) as it:
        assert (await asked(it, "m"))[0] == 200
        await it.evict("m", common_pb2.ON_DISK)
        volume.rename(volume.with_name("away"))
        status, error, retry_after = await asked(it, "m")
        # In the gateway's words, or in placement's, if the gateway has not heard of the error yet.
        assert status == 503 and error.endswith(": its folder does not exist"), error
        assert 1 <= int(retry_after) <= 30
        route = await told_of(it, "m")
        assert (route.residency, route.error) == (common_pb2.ERROR, "its folder does not exist") and route.retry_s

        async def explained():
            said = await it.placement.explanation("m", 1)
            return not said.HasField("prospect") and said.decisions[0].outcome.startswith("failed: its folder")

        await it.until(explained, "the decision does not say how it ended")
        assert (await asked(it, GOOD))[0] == 200, "others serve on"
        volume.with_name("away").rename(volume)

        async def served():
            return (await asked(it, "m"))[0] == 200

        await it.until(served, "it is not served though it is back, and nobody had a hand in it")

        # Whoever cannot wait adds it again.
        await it.evict("m", common_pb2.ON_DISK)
        volume.rename(volume.with_name("away"))
        assert (await asked(it, "m"))[0] == 503
        volume.with_name("away").rename(volume)
        await it.placement.add_model(common_pb2.ModelListing(name="m", path=str(volume / "m")))

        async def no_error():
            return not (await told_of(it, "m")).error

        await it.until(no_error, "it is still in error")
        await it.until(served, "it is not served though placement has no error of it")  # the gateway hears of it later


async def test_repaired_checkpoint_is_served_without_a_reload(volume):
    weights = volume / "m" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n")
    async with world("echo", {"m": {"path": str(volume / "m")}, GOOD: {}}) as it:
        status, error, retry_after = await asked(it, "m")
        assert status == 503 and "is a Git LFS pointer" in error and retry_after is None
        weights.write_bytes(whole)

        async def served():
            return (await asked(it, "m"))[0] == 200

        await it.until(served, "it is not served though it is whole")
