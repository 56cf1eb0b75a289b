"""Multi-head latent attention (MLA): its sizes by config.json, and the tensors of a layer.

The KV of a token is one row in each layer: a latent vector, from which the layer computes the keys and values of all
heads, and the part of the key that is rotated by position. All heads read the same row, so each device of a model has
all rows. Engines hold the projection from latent vectors to keys and values twice: as it is in the checkpoint, and
split into a part for keys and a part for values, which they apply to queries and to outputs instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loader.checkpoints.architectures import rope
from loader.checkpoints.config_values import CONFIG, check_given, number
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import ValueKind

REPLICATED = ("q_a_proj", "kv_a_proj_with_mqa")
"""Names of linear layers of which each device has the whole."""
_INDEX = ("index_topk", "index_head_dim", "index_n_heads")
"""Keys of models with sparse attention, in which an index chooses a few tokens that each token attends to."""
_ROPE = ("default", "yarn")
"""Kinds of rotary embeddings that engines compute for classes with latent attention. Engines would take any other kind
for YaRN."""
_FALSE = ValueKind("false: engines have no biases there", lambda value: value is False)
_TRUE = ValueKind("true: engines always truncate", lambda value: value is True)
_PAIRED = ValueKind("true: engines rotate adjacent elements", lambda value: value is True)
_WHOLE = ValueKind("1: engines rotate the whole of that part of a key", lambda value: value == 1)
_DENSE, _SPARSE = "dense", "sparse"


@dataclass(frozen=True)
class Latent:
    """The sizes of one model's latent attention, in elements."""

    rank: int
    """Elements of the latent vector of a token."""
    rotated: int
    """Elements of a key that are rotated by position; all heads share them."""
    plain: int
    """Elements of one head's key that are not rotated."""
    value: int
    """Elements of one head's value."""
    query_rank: int
    """Elements of the latent vector of queries; 0: queries are made of the hidden state."""

    @property
    def row(self) -> int:
        """Elements of the KV of one token in one layer, on every device."""
        return self.rank + self.rotated

    @property
    def query(self) -> int:
        """Elements of one head's query."""
        return self.plain + self.rotated


def refusal(name: str, config: Mapping[str, Any], served: bool) -> str | None:
    """Why the latent attention of a model of class `name` is not served; None if it is, or if the model has none.
    `served`: whether that of the class is."""
    if any(config.get(key) is not None for key in _INDEX):
        return f"{name} has sparse attention (DSA), which is not supported: its index has no elastic form yet"
    if config.get("kv_lora_rank") and not served:
        return f"{name} has multi-head latent attention (MLA), which is not supported for this class"
    return None


def read(config: Mapping[str, Any]) -> Latent:
    """The sizes by a config.json. Raises BrokenCheckpoint naming a key that is missing or impossible, or whose value
    engines do not compute."""
    if "q_lora_rank" not in config:
        raise BrokenCheckpoint(f"{CONFIG} has no q_lora_rank: null says that queries have none")
    check_given(CONFIG, config, {"attention_bias": _FALSE, "rope_interleave": _PAIRED, "partial_rotary_factor": _WHOLE})
    rope.check_kind(config, _ROPE, {"truncate": _TRUE, "partial_rotary_factor": _WHOLE})
    if config.get("topk_method") == "greedy" and config.get("n_group") != 1:
        raise BrokenCheckpoint(f"{CONFIG}: n_group = {config.get('n_group')!r} is not 1, which greedy selection has")
    _check_layers(config)
    sizes = Latent(
        rank=number(config, "kv_lora_rank"),
        rotated=number(config, "qk_rope_head_dim"),
        plain=number(config, "qk_nope_head_dim"),
        value=number(config, "v_head_dim"),
        query_rank=0 if config["q_lora_rank"] is None else number(config, "q_lora_rank"),
    )
    if sizes.rotated % 2:
        raise BrokenCheckpoint(f"{CONFIG}: qk_rope_head_dim = {sizes.rotated} is not a whole number of pairs")
    return sizes


def _check_layers(config: Mapping[str, Any]) -> None:
    """Raises BrokenCheckpoint if the list of layer types and the number of dense layers at the beginning disagree:
    Transformers goes by the list, engines go by the number."""
    kinds, dense = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
    if kinds is None or type(dense) is not int:
        return
    first = min(dense, len(kinds)) if isinstance(kinds, list) else 0
    if not isinstance(kinds, list) or kinds != [_DENSE] * first + [_SPARSE] * (len(kinds) - first):
        raise BrokenCheckpoint(f"{CONFIG}: mlp_layer_types is not {dense} times dense, as first_k_dense_replace has it")


def tensors(sizes: Latent, heads: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of a layer's attention, by name."""
    found: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (sizes.row, hidden),
        "self_attn.kv_a_layernorm.weight": (sizes.rank,),
        "self_attn.kv_b_proj.weight": (heads * (sizes.plain + sizes.value), sizes.rank),
        "self_attn.o_proj.weight": (hidden, heads * sizes.value),
    }
    if not sizes.query_rank:
        return found | {"self_attn.q_proj.weight": (heads * sizes.query, hidden)}
    return found | {
        "self_attn.q_a_proj.weight": (sizes.query_rank, hidden),
        "self_attn.q_a_layernorm.weight": (sizes.query_rank,),
        "self_attn.q_b_proj.weight": (heads * sizes.query, sizes.query_rank),
    }


def made(sizes: Latent, heads: int) -> tuple[int, int]:
    """Elements of the two tensors that an engine makes of a layer's projection and keeps beside it, on a device with
    `heads` heads: that for keys, and that for values."""
    return heads * sizes.plain * sizes.rank, heads * sizes.value * sizes.rank
