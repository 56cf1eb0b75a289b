"""Models that cannot be served, beside one that can."""

import asyncio
import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from loader.checkpoints.architectures import families
from prismctl.__main__ import app
from protos import common_pb2, placement_pb2
from services.errors import PrismError
from testing.systems.local import FOLDER, MODELS, world
from tests.loader import checkpoint_files

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


TEXT = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1 << 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
}
STATES = {
    **TEXT,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 1 << 12,
    "linear_value_head_dim": 1 << 12,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
"""A state of 64 MiB."""
WINDOWS = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "text_config": {
        **TEXT,
        "model_type": "gemma4_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 1 << 23,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    },
}
"""A window of eight million tokens."""


def of_config(folder, config):
    """A folder with this config.json, whose tensors are holes, and the tokenizer of another model."""
    shutil.copytree(FOLDER / GOOD, folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = families.expected_tensors(families.read_shape(config), config)
    inner = "model.language_model." if "text_config" in config else "model."
    named = {re.sub("^model.", inner, name): ("BF16", size) for name, size in tensors.items()}
    checkpoint_files.write_safetensors(folder / "model.safetensors", checkpoint_files.described(named))
    return folder


async def test_models_whose_kv_fits_no_device_are_in_error_from_the_start_and_told_which_context_would_fit(tmp_path):
    long = {**json.loads((FOLDER / GOOD / "config.json").read_text()), "max_position_embeddings": 1 << 24}
    configs = {"long": long, "window": WINDOWS, "state": STATES}
    models = {name: {"path": str(of_config(tmp_path / name, config))} for name, config in configs.items()}
    async with world("echo", {**models, GOOD: {}}) as it:
        routes = {route.model.name: route for route in (await it.placement.routes()).routes}
        _, listed = await it.get("/v1/models")
        rows = await asyncio.to_thread(
            CliRunner().invoke, app, ["--state", str(it.local.state), "models", "list", "--json"]
        )
        printed = {row["model"]: row for row in json.loads(rows.stdout)}
        for name in models:
            why = routes[name].error
            assert "; the largest group, " in why, why
            told = {"id": name, "residency": "error", "error": why}
            assert [told] == [{key: each[key] for key in told} for each in listed["data"] if each["id"] == name]
            assert (printed[name]["state"], printed[name]["error"]) == ("error", why)
            status, answer = await it.post("/v1/completions", {"model": name, "prompt": [5], "max_tokens": 1})
            assert status == 503 and why in answer["error"]["message"], answer
            decided = (await it.placement.explanation(name, 9)).decisions
            assert not [each for each in decided if each.action != "refuse"], "no group has tried it"
        assert "bytes of KV before its first token" in routes["state"].error
        assert routes["state"].error.endswith("no context is short enough")
        for name in ("long", "window"):
            named = re.search(
                r"with context_tokens \(and any floor_tokens\) of about ([0-9,]+) it would fit$", routes[name].error
            )
            assert named is not None, routes[name].error
            listing = common_pb2.ModelListing(
                name=f"shorter-{name}", context_tokens=int(named[1].replace(",", "")), **models[name]
            )
            await it.placement.add_model(listing, check_only=True)


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
