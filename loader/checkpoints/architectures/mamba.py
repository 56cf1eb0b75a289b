"""Models with Mamba2 layers (Nemotron-H), by their config.json. Pure.

In such a model each layer is one part alone: a Mamba layer, attention, a dense layer or a mixture of experts. The
configuration names them in order. The state of a request in a Mamba layer is the last inputs of its convolution, in the
floats of the device, and a matrix for each head, in the floats that the configuration names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from loader.checkpoints.config_values import CONFIG, check, check_given, number
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import COUNT, FLAG, NAMES, TEXT, ValueKind, at_least, one_of

RECURRENT, ATTENTION, DENSE, EXPERTS = "M", "*", "-", "E"
"""Letters of `hybrid_override_pattern`, one for each layer."""
_LETTERS = {"mamba": RECURRENT, "attention": ATTENTION, "mlp": DENSE, "moe": EXPERTS}
"""Names of `layers_block_type`, with the letters of the same layers."""
_NEWER_NAMES = {"linear_attention": RECURRENT, "full_attention": ATTENTION}
"""Other names that newer versions of Transformers write for two of these, with their letters."""
_STATE_FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of the floats that `mamba_ssm_dtype` may name."""
_GROUPS = 8
"""Number of groups of a Mamba layer that engines take where there is no `mamba_n_groups`."""
_SAME = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
"""Keys of newer configurations, with those of older ones that mean the same."""
_NO_BIAS = ValueKind("false: engines have no biases there", lambda value: value is False)
_NO_LIMITS = ValueKind("0 and infinity: engines limit no time steps", lambda value: _bounds(value) == [0.0, math.inf])
_GIVEN = {
    "use_bias": FLAG,
    "use_conv_bias": FLAG,
    "mlp_bias": FLAG,
    "attention_bias": _NO_BIAS,
    "mlp_hidden_act": one_of("relu2"),
    "mamba_hidden_act": one_of("silu", "swish"),
    "layer_norm_epsilon": at_least(0),
    "time_step_limit": _NO_LIMITS,
    "moe_latent_size": COUNT,
    "chunk_size": COUNT,
    # With 0, engines would leave out the shared experts, and the model would not.
    "n_shared_experts": COUNT,
}
"""Values that keys have to have if they are given: at others engines fail, or compute something else."""


def layers(text: Mapping[str, Any]) -> str:
    """The letters of all layers, in order, one for each. Raises BrokenCheckpoint if the configuration does not name the
    layers, or contradicts itself."""
    pattern, names = text.get("hybrid_override_pattern"), text.get("layers_block_type")
    if text.get("layer_types") is not None:
        raise BrokenCheckpoint(f"{CONFIG}: engines read layers_block_type, not layer_types")
    if pattern is None and names is None:
        raise BrokenCheckpoint(f"{CONFIG} has neither hybrid_override_pattern nor layers_block_type")
    if pattern is not None:
        check(CONFIG, "hybrid_override_pattern", pattern, TEXT)
        if other := next((letter for letter in pattern if letter not in _LETTERS.values()), None):
            raise BrokenCheckpoint(f"{CONFIG}: hybrid_override_pattern has {other!r}, a layer that is not known")
    if names is not None:
        check(CONFIG, "layers_block_type", names, NAMES)
        letters = _LETTERS | _NEWER_NAMES
        if other := next((name for name in names if name not in letters), None):
            raise BrokenCheckpoint(f"{CONFIG}: layers_block_type has {other!r}; engines know {', '.join(_LETTERS)}")
        named = "".join(letters[name] for name in names)
        if pattern not in (None, named):
            raise BrokenCheckpoint(f"{CONFIG}: layers_block_type and hybrid_override_pattern are of different layers")
        pattern = named
    assert isinstance(pattern, str)
    if text.get("num_hidden_layers") not in (None, len(pattern)):
        raise BrokenCheckpoint(f"{CONFIG} names {len(pattern)} of {text['num_hidden_layers']} layers")
    for letter, what in ((RECURRENT, "a Mamba layer"), (ATTENTION, "attention")):
        if letter not in pattern:
            raise BrokenCheckpoint(f"{CONFIG}: no layer is {what}, and engines serve models with some of each")
    return pattern


def check_config(text: Mapping[str, Any]) -> None:
    """Raises BrokenCheckpoint where engines would compute something else than the model."""
    check_given(CONFIG, text, _GIVEN)
    for key, older in _SAME.items():
        if text.get(older) is not None and text[older] != text.get(key):
            raise BrokenCheckpoint(f"{CONFIG}: {key} is {text.get(key)}, and {older} is {text[older]}")
    groups, heads = number(text, "n_groups"), number(text, "mamba_num_heads")
    # Engines size the cache by n_groups, and the layer by mamba_n_groups.
    if groups != _GROUPS and text.get("mamba_n_groups") is None:
        raise BrokenCheckpoint(f"{CONFIG}: n_groups is {groups} without mamba_n_groups: engines take {_GROUPS} for it")
    if heads % groups:
        raise BrokenCheckpoint(f"{CONFIG}: {heads} heads of Mamba layers cannot share {groups} groups")
    if text.get("mlp_bias") and EXPERTS in layers(text):
        raise BrokenCheckpoint(f"{CONFIG}: mlp_bias is true, and engines have no biases in shared experts")


def tensors(text: Mapping[str, Any], hidden: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a Mamba layer, by their names within it."""
    heads, inner, mixed = number(text, "mamba_num_heads"), _inner(text), _mixed(text)
    found: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (inner + mixed + heads, hidden),
        "conv1d.weight": (mixed, 1, number(text, "conv_kernel")),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }
    if text.get("use_conv_bias", True):
        found["conv1d.bias"] = (mixed,)
    if text.get("use_bias"):
        found |= {"in_proj.bias": (inner + mixed + heads,), "out_proj.bias": (hidden,)}
    return found


def state_bytes(text: Mapping[str, Any], dtype_bytes: int, devices: int) -> int:
    """Bytes of the state of a request in one Mamba layer, on each device. `dtype_bytes`: bytes of a float there."""
    inputs = _mixed(text, devices) * (number(text, "conv_kernel") - 1) * dtype_bytes
    return inputs + _inner(text, devices) * number(text, "ssm_state_size") * float_bytes(text)


def float_bytes(text: Mapping[str, Any]) -> int:
    """Bytes of a float in the matrices of a state, of Mamba layers and of gated delta nets. Engines read
    `mamba_ssm_dtype` alone, and not the `mamba_ssm_cache_dtype` that Nemotron-H's files have. Raises BrokenCheckpoint
    for floats that are not known."""
    floats = text.get("mamba_ssm_dtype") or "float32"
    check(CONFIG, "mamba_ssm_dtype", floats, one_of(*_STATE_FLOATS))
    return _STATE_FLOATS[floats]


def _inner(text: Mapping[str, Any], devices: int = 1) -> int:
    """Elements of all heads of a Mamba layer on each device."""
    return -(-number(text, "mamba_num_heads") // devices) * number(text, "mamba_head_dim")


def _mixed(text: Mapping[str, Any], devices: int = 1) -> int:
    """Rows that the convolution of a Mamba layer mixes, on each device: those of all heads, and for each group those of
    the state's input and of its output."""
    groups = -(-number(text, "n_groups") // devices)
    return _inner(text, devices) + 2 * groups * number(text, "ssm_state_size")


def _bounds(value: Any) -> list[float]:
    """The numbers of a list; none for anything else. Newer Transformers write infinity, which JSON does not have, as an
    object."""
    if not isinstance(value, list):
        return []
    try:
        return [float(each["__float__"] if isinstance(each, dict) else each) for each in value]
    except (KeyError, TypeError, ValueError):
        return []
