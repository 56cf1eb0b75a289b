"""Models whose layers with a window have other heads than the other layers, by their config.json (Gemma 4). Pure.

`head_dim` and `num_key_value_heads` describe the layers with a window. The other layers have larger heads, and, in
models in which their values are their keys, another number of key-value heads.

In the small models (E2B, E4B) the last layers have no KV of their own: each uses that of the last layer of its type
that has some. Every layer of these models has an embedding of its own for each token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loader.checkpoints.config_values import CONFIG, check, check_given
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import COUNT, COUNT_OR_NONE, FLAG, ValueKind

_WINDOW = ValueKind("2 or more: engines have no window of a token alone", lambda value: value > 1)
_NOT_SERVED = {
    "use_bidirectional_attention": "attention to what follows",
}
"""Parts that models of these classes may have and that are not served, by the keys of config.json that switch them
on."""


@dataclass(frozen=True)
class FullHeads:
    """The heads of layers without a window."""

    kv_heads: int
    head_dim: int
    values_are_keys: bool
    """Whether values are the keys, so that a checkpoint has no projection for them."""


@dataclass(frozen=True)
class LayerParts:
    """Parts in which the layers of a Gemma 4 model differ from each other."""

    own_kv: int
    """Number of layers that have KV of their own; these layers come first."""
    wide: bool
    """Whether the MLP is twice as wide in the layers without KV of their own."""
    embedding: int
    """Elements of the embedding that each layer has for a token; 0: only the model has embeddings."""
    tokens: int
    """Number of tokens that have embeddings in layers."""


def refusal(name: str, text: Mapping[str, Any]) -> str | None:
    """Why a model of such a class is not served; None if it may be."""
    for key, what in _NOT_SERVED.items():
        # "vision": tokens attend to both sides within an image only, and no image comes.
        if text.get(key) and not (key == "use_bidirectional_attention" and text[key] == "vision"):
            return f"{name} has {what} ({key}), which is not supported"
    return None


def read(text: Mapping[str, Any], heads: int, kv_heads: int) -> FullHeads:
    """The heads of layers without a window. `heads`: attention heads of every layer; `kv_heads`: key-value heads of
    layers with a window. Raises BrokenCheckpoint naming a key that is missing or impossible."""
    check_given(CONFIG, text, {"attention_k_eq_v": FLAG, "sliding_window": _WINDOW})
    same = text.get("attention_k_eq_v") is True
    given = text.get("num_global_key_value_heads") if same else None
    for key in ("global_head_dim", *(["num_global_key_value_heads"] if given is not None else [])):
        if text.get(key) is None:
            raise BrokenCheckpoint(f"{CONFIG} has no {key}")
        check(CONFIG, key, text[key], COUNT)
    full = int(given) if given is not None else kv_heads
    if heads % full:
        raise BrokenCheckpoint(f"{CONFIG}: {heads} attention heads cannot share {full} key-value heads")
    return FullHeads(full, int(text["global_head_dim"]), same)


def read_parts(text: Mapping[str, Any], layers: int) -> LayerParts:
    """The parts in which a model's `layers` layers differ. Raises BrokenCheckpoint naming a key that is missing or
    impossible."""

    def count(key: str) -> int:
        found = text.get(key) or 0
        check(CONFIG, key, found, COUNT_OR_NONE)
        return int(found)

    check_given(CONFIG, text, {"use_double_wide_mlp": FLAG})
    shared, embedding = count("num_kv_shared_layers"), count("hidden_size_per_layer_input")
    tokens = count("vocab_size_per_layer_input") if embedding else 0
    kinds = text["layer_types"]
    own = layers - shared
    if own < 1 or set(kinds[own:]) - set(kinds[:own]):
        raise BrokenCheckpoint(f"{CONFIG}: num_kv_shared_layers = {shared} leaves layers without any whose KV they use")
    if embedding and not tokens:
        raise BrokenCheckpoint(f"{CONFIG} has no vocab_size_per_layer_input")
    return LayerParts(own, text.get("use_double_wide_mlp") is True, embedding, tokens)
