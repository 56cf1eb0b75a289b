"""Reading the folder of an adapter (LoRA) in PEFT's format: what it changes, or why it cannot be served; and whether it
fits a model. The configuration and the header of the weights are read, no weights."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.checkpoints.config_values import check_given
from loader.checkpoints.errors import BrokenCheckpoint, PassingFault
from loader.checkpoints.weight_files import FLOATS, INDEX, SINGLE, Tensor, read_header, read_json
from loader.policy.adapter_pool import MODULES, MOST_RANK, Linear
from services.wording.json_values import COUNT, FLAG, ValueKind, is_number
from services.wording.plurals import counted

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")
_KINDS = {
    "r": COUNT,
    "lora_alpha": ValueKind("a number", is_number),
    "use_rslora": FLAG,
    "layers_to_transform": ValueKind(
        "the number of a layer, or a list of such numbers",
        lambda value: all(type(each) is int for each in (value if isinstance(value, list) else [value])),
    ),
}
_REFUSED = {
    "use_dora": "it is DoRA",
    "modules_to_save": "it replaces whole layers of its base (modules_to_save)",
    "trainable_token_indices": "it changes embeddings (trainable_token_indices)",
    "rank_pattern": "its layers have different ranks (rank_pattern)",
    "alpha_pattern": "its layers have different scales (alpha_pattern)",
    "fan_in_fan_out": "its weights are transposed (fan_in_fan_out)",
    "layer_replication": "it repeats layers of its base (layer_replication)",
    "lora_bias": "it has biases (lora_bias)",
    "target_parameters": "it changes parameters that are no linear layers (target_parameters)",
    "megatron_config": "it is for Megatron's layers (megatron_config)",
    "use_qalora": "it is QALoRA",
    "alora_invocation_tokens": "it holds from certain tokens on only (alora_invocation_tokens)",
    "arrow_config": "it chooses among other adapters (arrow_config)",
    "use_bdlora": "it is BD-LoRA",
    "kasa_config": "it is KaSA",
    "monteclora_config": "it is MonteCLoRA",
}
"""Settings of PEFT that are refused where they are given and not false, and what they make of an adapter."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` with which PEFT changes the base's weights too."""


@dataclass(frozen=True)
class AdapterCheckpoint:
    """An adapter by its configuration and the header of its weights."""

    generation: int
    """Number of the state of the folder's files, as in Checkpoint."""
    rank: int
    layers: tuple[int, ...]
    """Numbers of the decoder layers that it changes."""
    linears: tuple[Linear, ...]
    """Linear layers that it changes in each of these decoder layers."""
    whole: bool
    """Whether it is meant to change all layers of its base."""
    elements: int
    """Numbers in its weights."""


def is_adapter(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder has an adapter and no whole model."""
    folder = Path(folder)
    return (folder / CONFIG).is_file() and not any((folder / name).exists() for name in (SINGLE, INDEX))


def read(folder: str | os.PathLike[str], generation: int) -> AdapterCheckpoint:
    """Reads and checks an adapter's folder, whose files are of this generation. Blocks on the file system. Raises
    BrokenCheckpoint with one line that names what is wrong."""
    folder = Path(folder)
    try:
        if not folder.is_dir():
            raise PassingFault("its folder does not exist" if not folder.exists() else "its path is a file")
        if not (folder / CONFIG).exists():
            if any((folder / name).exists() for name in (SINGLE, INDEX)):
                raise BrokenCheckpoint("it is a whole model, not an adapter: list it without base")
            raise PassingFault(f"its folder has no {CONFIG}")
        config = read_json(folder / CONFIG)
        if not isinstance(config, dict):
            raise BrokenCheckpoint(f"{CONFIG} is not a JSON object")
        rank = _checked(config)
        if not (folder / WEIGHTS).exists():
            if (folder / PICKLED).exists():
                raise BrokenCheckpoint(f"its weights are pickled ({PICKLED}): save them as safetensors")
            raise PassingFault(f"its folder has no {WEIGHTS}")
        return _read(config, rank, read_header(folder / WEIGHTS), generation)
    except OSError as error:
        raise PassingFault(f"its folder: {error.strerror or error}") from None


def _checked(config: Mapping[str, Any]) -> int:
    """The rank. Raises BrokenCheckpoint for a configuration that is not served, by the name of what is not."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise BrokenCheckpoint(f"{CONFIG}: peft_type is {kind!r}, and only 'LORA' is served")
    for key in ("r", "lora_alpha", "target_modules"):
        if config.get(key) is None:
            raise BrokenCheckpoint(f"{CONFIG} has no {key}")
    check_given(CONFIG, config, _KINDS)
    for key, what in _REFUSED.items():
        if config.get(key):
            raise BrokenCheckpoint(f"{what}, which is not served")
    if (bias := config.get("bias", "none")) != "none":
        raise BrokenCheckpoint(f"it has biases (bias is {bias!r}), which is not served")
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_BASE):
        raise BrokenCheckpoint(f"its init_lora_weights {how!r} changes its base too: convert it to a plain LoRA")
    rank = int(config["r"])
    if rank > MOST_RANK:
        raise BrokenCheckpoint(f"its rank is {rank}, at most {MOST_RANK} is served")
    return rank


def _read(config: Mapping[str, Any], rank: int, tensors: Mapping[str, Tensor], generation: int) -> AdapterCheckpoint:
    parts: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or found[2] not in MODULES:
            raise BrokenCheckpoint(f"{WEIGHTS}: {name} is of no layer that may have an adapter ({', '.join(MODULES)})")
        if tensor.dtype not in FLOATS or len(tensor.shape) != 2:
            raise BrokenCheckpoint(f"{WEIGHTS}: {name} is {tensor.dtype} {list(tensor.shape)}, not a matrix of floats")
        parts.setdefault((int(found[1]), found[2]), {})[found[3]] = tensor
    if not parts:
        raise BrokenCheckpoint(f"{WEIGHTS} has no tensors")
    linears: dict[str, Linear] = {}
    for (layer, module), pair in parts.items():
        where = f"layer {layer}'s {module}"
        if len(pair) < 2:
            raise BrokenCheckpoint(f"{WEIGHTS} lacks lora_{'B' if 'A' in pair else 'A'} of {where}")
        a, b = pair["A"].shape, pair["B"].shape
        if a[0] != rank or b[1] != rank:
            raise BrokenCheckpoint(f"{WEIGHTS}: {where} has {list(a)} and {list(b)}, and {CONFIG} the rank {rank}")
        linear = Linear(module, b[0], a[1])
        if linears.setdefault(module, linear) != linear:
            raise BrokenCheckpoint(f"{WEIGHTS}: {where} has another shape than other layers'")
    layers = tuple(sorted({layer for layer, _ in parts}))
    lacking = [f"layer {layer}'s {name}" for layer in layers for name in sorted(linears) if (layer, name) not in parts]
    lacking += [name for name in _targets(config) if name not in linears]
    if lacking:
        others = f" and {counted(len(lacking) - 1, 'other')}" if len(lacking) > 1 else ""
        raise BrokenCheckpoint(f"{WEIGHTS} lacks {lacking[0]}{others}")
    some = config.get("layers_to_transform")
    if some is not None and sorted({*(some if isinstance(some, list) else [some])}) != list(layers):
        raise BrokenCheckpoint(f"{WEIGHTS} has other layers than layers_to_transform of {CONFIG}")
    if some is None and layers != tuple(range(len(layers))):
        raise BrokenCheckpoint(f"{WEIGHTS} lacks layer {next(n for n in range(len(layers)) if n != layers[n])}")
    elements = sum(tensor.elements for tensor in tensors.values())
    changed = tuple(linears[name] for name in sorted(linears))
    return AdapterCheckpoint(generation, rank, layers, changed, some is None, elements)


def _targets(config: Mapping[str, Any]) -> list[str]:
    """Names of the layers that the adapter says it changes, as far as it names them; a pattern names none. Raises
    BrokenCheckpoint for one that may have no adapter."""
    told = config["target_modules"]
    if isinstance(told, str):
        return []
    if not isinstance(told, list) or not all(isinstance(each, str) for each in told):
        raise BrokenCheckpoint(f"{CONFIG}: target_modules is neither a list of names nor a pattern")
    names = [each.rpartition(".")[2] for each in told]
    if other := next((each for each in names if each not in MODULES), None):
        raise BrokenCheckpoint(f"it changes {other}; layers that may have an adapter are {', '.join(MODULES)}")
    return names


def unfit(adapter: AdapterCheckpoint, layers: int, linears: Iterable[Linear]) -> str:
    """Why an adapter is not one of a model with so many decoder layers of these linear layers, in one line; empty: it
    fits."""
    sizes = {each.name: each for each in linears}
    for each in adapter.linears:
        base = sizes[each.name]
        if each != base:
            of = f"{each.rows} × {each.columns}"
            return f"it is for another model: its {each.name} is {of}, its base's {base.rows} × {base.columns}"
    if adapter.layers[-1] >= layers:
        return f"it is for another model: it has layer {adapter.layers[-1]}, its base has {layers} layers"
    if adapter.whole and len(adapter.layers) < layers:
        return f"it is for another model: it has {len(adapter.layers)} layers, its base {layers}"
    return ""
