"""Which files of a repository belong to a model."""

from __future__ import annotations

import re
from collections.abc import Collection

from loader.checkpoints.weight_files import INDEX, SINGLE, other_weights

CONFIG = "config.json"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter (LoRA), as PEFT saves them."""
_SUFFIXES = (".json", ".jinja", ".model", ".txt")
"""Ends of the names of configurations, tokenizers and chat templates."""
_POOLING = re.compile(r"[^/]+/config\.json")
"""Configurations of a sentence-transformers model's modules, each in a folder of its own."""
_MODULES = "modules.json"
_OTHERS = {
    ADAPTER[0]: "it is an adapter (LoRA), not a whole model: prism fetch fetches it, and a catalogue lists its folder "
    "with base",
    "model_index.json": "it is a pipeline of diffusers, not a model of text",
    "params.json": "it has its publisher's own format (params.json) only",
}
"""File that a repository without a model has -> what it is."""


def is_adapter(names: Collection[str]) -> bool:
    """Whether the files of a repository are an adapter and no whole model."""
    return ADAPTER[0] in names and not (CONFIG in names and (SINGLE in names or INDEX in names))


def fault(names: Collection[str], *, adapters: bool = False) -> str | None:
    """Why the files of a repository are no model that can be served; None if they may be one, or an adapter where
    `adapters` says that one will do."""
    top = [name for name in names if "/" not in name]
    whole = SINGLE in top or INDEX in top
    if CONFIG in top and whole:
        return None
    if adapters and is_adapter(top):
        return None if ADAPTER[1] in top else f"it is an adapter without {ADAPTER[1]}: its weights have another format"
    for name, what in _OTHERS.items():
        if name in top and not (CONFIG in top and name == "params.json"):
            return what
    if (why := other_weights(top)) is not None:
        return why
    if CONFIG not in top:
        return f"it has no {CONFIG}: it is not a model in Hugging Face's format"
    return f"it has no safetensors: neither {SINGLE} nor {INDEX}"


def of_model(names: Collection[str], shards: Collection[str]) -> list[str]:
    """The files to fetch. `shards`: those that the index names, if there is one. Weights in other formats, in folders,
    or beside those that engines read (consolidated.safetensors) are left out; of an adapter all but its own two."""
    if is_adapter(names):
        return [name for name in names if name in ADAPTER]
    weights = {*shards, INDEX} if INDEX in names else {SINGLE}
    pooling = _MODULES in names
    return [
        name
        for name in names
        if name in weights
        or ("/" not in name and name.endswith(_SUFFIXES))
        or (pooling and _POOLING.fullmatch(name) is not None)
    ]
