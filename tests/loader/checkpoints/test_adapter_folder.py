"""Folders of adapters: what is read of them, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.checkpoints import adapter_folder, checkpoint
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from loader.policy.adapter_pool import Linear
from testing import small_adapters
from tests.loader import checkpoint_files

Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_files.write(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return small_adapters.write(base, tmp_path / "a", rank=4, modules=("q_proj", "down_proj"))


def told(folder: Path, **values: Any) -> None:
    path = folder / adapter_folder.CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def weights(folder: Path, **changes: Any) -> None:
    """Tensors by name, dots written as `__`; None: it is left out."""
    tensors = load_file(folder / adapter_folder.WEIGHTS)
    for name, tensor in changes.items():
        tensors[name.replace("__", ".")] = tensor
    save_file({name: each for name, each in tensors.items() if each is not None}, folder / adapter_folder.WEIGHTS)


def test_an_adapter_says_which_layers_it_changes_and_how_much_it_holds(folder: Path) -> None:
    found = adapter_folder.read(folder, 7)
    assert (found.generation, found.rank, found.layers, found.whole) == (7, 4, (0, 1), True)
    assert found.linears == (Linear("down_proj", 32, 48), Linear("q_proj", 32, 32))
    assert found.elements == 2 * 4 * (32 + 48 + 32 + 32)


def test_an_adapter_of_some_layers_is_read_if_it_says_so(base: Path, folder: Path) -> None:
    named = {name: None for name in load_file(folder / adapter_folder.WEIGHTS) if ".layers.0." in name}
    weights(folder, **{name.replace(".", "__"): gone for name, gone in named.items()})
    with pytest.raises(BrokenCheckpoint, match="lacks layer 0"):
        adapter_folder.read(folder, 7)
    told(folder, layers_to_transform=1)
    found, of = adapter_folder.read(folder, 7), checkpoint.read(base, 4)
    assert found.layers == (1,) and adapter_folder.unfit(found, of.layers, of.linears) == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: told(f, peft_type="IA3"), "peft_type is 'IA3'"),
        (lambda f: told(f, r=None), "has no r"),
        (lambda f: told(f, r=0), "r = 0 is not"),
        (lambda f: told(f, r=512), "its rank is 512, at most 256"),
        (lambda f: told(f, r=8), r"has \[4, 48\] and \[32, 4\], and adapter_config.json the rank 8"),
        (lambda f: told(f, lora_alpha="big"), "lora_alpha"),
        (lambda f: told(f, use_dora=True), "it is DoRA"),
        (lambda f: told(f, alora_invocation_tokens=[5, 6]), "from certain tokens on only"),
        (lambda f: told(f, bias="lora_only"), "it has biases"),
        (lambda f: told(f, modules_to_save=["lm_head"]), "modules_to_save"),
        (lambda f: told(f, rank_pattern={"q_proj": 2}), "rank_pattern"),
        (lambda f: told(f, init_lora_weights="pissa_niter_4"), "pissa_niter_4.*convert it"),
        (lambda f: told(f, target_modules=["embed_tokens"]), "it changes embed_tokens"),
        (lambda f: told(f, target_modules=["q_proj", "down_proj", "o_proj"]), "lacks o_proj"),
        (lambda f: told(f, layers_to_transform=[0]), "other layers than layers_to_transform"),
        (lambda f: weights(f, **{f"{Q}__lora_B__weight".replace(".", "__"): None}), "lacks lora_B of layer 1's q_proj"),
        (
            lambda f: weights(f, base_model__model__model__embed_tokens__weight=torch.zeros(4, 4)),
            "embed_tokens.weight is of no layer that may have an adapter",
        ),
        (lambda f: weights(f, **{f"{Q}__lora_A__weight".replace(".", "__"): torch.zeros(4, 16)}), "another shape"),
        (lambda f: weights(f, **{f"{Q}__lora_A__weight".replace(".", "__"): torch.zeros(4, 32).int()}), "is I32"),
        (lambda f: (f / adapter_folder.WEIGHTS).rename(f / adapter_folder.PICKLED), "its weights are pickled"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_what_it_has(folder: Path, change: Any, why: str) -> None:
    change(folder)
    with pytest.raises(BrokenCheckpoint, match=why) as refused:
        adapter_folder.read(folder, 7)
    assert not refused.value.may_pass


def test_an_adapter_that_is_not_there_yet_may_pass(folder: Path, base: Path) -> None:
    with pytest.raises(BrokenCheckpoint, match="it is a whole model, not an adapter"):
        adapter_folder.read(base, 7)
    for gone in (adapter_folder.WEIGHTS, adapter_folder.CONFIG):
        (folder / gone).unlink()
        with pytest.raises(PassingFault, match=f"no {gone}"):
            adapter_folder.read(folder, 7)
    with pytest.raises(PassingFault, match="does not exist"):
        adapter_folder.read(folder / "nowhere", 7)


def test_an_adapter_of_another_model_does_not_fit_and_says_where(folder: Path, base: Path) -> None:
    found, of = adapter_folder.read(folder, 7), checkpoint.read(base, 4)
    assert adapter_folder.unfit(found, of.layers, of.linears) == ""
    wider = [Linear(each.name, 2 * each.rows, each.columns) for each in of.linears]
    assert "its down_proj is 32 × 48, its base's 64 × 48" in adapter_folder.unfit(found, of.layers, wider)
    assert "it has 2 layers, its base 3" in adapter_folder.unfit(found, 3, of.linears)
    assert "it has layer 1, its base has 1 layers" in adapter_folder.unfit(found, 1, of.linears)


def test_models_whose_adapters_are_not_served_say_why(tmp_path: Path) -> None:
    folder = checkpoint_files.write(tmp_path / "m")
    assert checkpoint.read(folder, 4).linears and not checkpoint.read(folder, 4).no_adapters
    found = checkpoint.read(folder, 4, devices=2)
    assert (found.linears, found.no_adapters) == ((), "adapters of a model on 2 devices are not served")
    assert "embeddings" in checkpoint.read(folder, 4, task="embed").no_adapters
