"""The table of model classes: what is read of a folder of each kind, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoints import classes
from loader.checkpoints.checkpoint import read
from loader.checkpoints.errors import BrokenCheckpoint
from testing import small_checkpoints as small

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "models.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of classes, each written once."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = small.write(architecture, tmp_path_factory.mktemp("model") / "m")
        return made[architecture]

    return folder


def changed(folder: Path, into: Path, change: Any) -> Path:
    """A folder with the same weights, whose config.json `change` has changed."""
    into.mkdir()
    for path in folder.iterdir():
        (into / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (into / "config.json").unlink()
    (into / "config.json").write_text(json.dumps(config))
    return into


def test_classes_verified_on_cpu_have_a_small_checkpoint_to_compare_engines_by() -> None:
    assert small.CLASSES.keys() == {name for name, known in classes.CLASSES.items() if "CPU" in known.verified}
    assert all(known.gpu_only for known in classes.CLASSES.values() if "CPU" not in known.verified)


def test_table_of_model_classes_is_in_the_guide() -> None:
    assert classes.markdown() in GUIDE.read_text()


def test_a_class_on_two_devices_has_half_of_the_experts_and_of_the_heads(folders: Any) -> None:
    one, two = (read(folders("Qwen3MoeForCausalLM"), 4, devices) for devices in (1, 2))
    assert two.kv_bytes_per_token == one.kv_bytes_per_token // 2
    assert one.weights_bytes / 2 < two.weights_bytes < 0.6 * one.weights_bytes


def test_a_wrapper_is_read_by_its_text_config_and_is_as_large_as_all_its_parts(folders: Any) -> None:
    text, whole = (read(folders(name), 4) for name in ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"))
    assert (whole.context_tokens, whole.layers, whole.kv_bytes_per_token) == (
        text.context_tokens,
        text.layers,
        text.kv_bytes_per_token,
    )
    assert text.weights_bytes < whole.weights_bytes < 1.2 * text.weights_bytes


@pytest.mark.parametrize(
    ("architecture", "change", "reason"),
    [
        ("Gemma3ForConditionalGeneration", lambda c: c.pop("text_config"), "no text_config, which describes the"),
        ("Gemma2ForCausalLM", lambda c: c.pop("hidden_act"), "config.json has no hidden_act"),
        ("Gemma2ForCausalLM", lambda c: c.update(hidden_act="silu"), "hidden_act = 'silu' is not gelu_pytorch_tanh"),
        ("MixtralForCausalLM", lambda c: c.pop("num_local_experts"), "config.json has no num_local_experts"),
        ("MixtralForCausalLM", lambda c: c.update(num_local_experts=-1), "num_local_experts = -1 is not a whole"),
        ("MixtralForCausalLM", lambda c: c.update(num_local_experts=5), "the weights lack model.layers.0.block_sparse"),
        ("MixtralForCausalLM", lambda c: c.update(sliding_window=16), "sliding-window attention"),
        ("Phi3ForCausalLM", lambda c: c.update(sliding_window=16), "sliding-window attention"),
        ("Glm4MoeForCausalLM", lambda c: c.update(first_k_dense_replace=2), "the weights lack model.layers.1.mlp."),
        ("Glm4MoeForCausalLM", lambda c: c.update(kv_lora_rank=512), "latent attention"),
    ],
)
def test_setting_that_a_class_cannot_have_is_refused_by_name(
    tmp_path: Path, folders: Any, architecture: str, change: Any, reason: str
) -> None:
    with pytest.raises(BrokenCheckpoint) as broken:
        read(changed(folders(architecture), tmp_path / "m", change), 4)
    assert reason in str(broken.value)


def test_layers_beyond_those_of_the_model_are_not_counted(tmp_path: Path, folders: Any) -> None:
    """Published GLM 4.5 has one that predicts several tokens at once; engines do not load it."""
    folder = folders("Glm4MoeForCausalLM")
    fewer = read(changed(folder, tmp_path / "m", lambda c: c.update(num_hidden_layers=3)), 4)
    assert fewer.layers == 3 and fewer.weights_bytes < read(folder, 4).weights_bytes
