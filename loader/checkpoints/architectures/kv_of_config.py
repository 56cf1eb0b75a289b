"""The kinds of KV that a model has, by its config.json. Classes that are refused are read too.

Sizes are those of SGLang's pools. Keys and values, and the latent row of a token in each layer (MLA: DeepSeek, GLM 4.7
Flash), are in the floats of the device. A layer with a state, which is a gated delta net (Qwen 3 Next and 3.5) or a
Mamba layer (`mamba.py`), keeps the last inputs of its convolution in the floats of the device, and a matrix for each
head in the floats that the configuration names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kv_kinds.layout import BEYOND_WINDOW_TOKENS, KvKind, KvLayout, attention, latent, state, window
from loader.checkpoints.architectures import mamba
from loader.checkpoints.architectures.classes import CLASSES, MAMBA
from loader.checkpoints.architectures.families import UNCOUNTED_KV, checked_layers, text_config
from loader.checkpoints.config_values import CONFIG, check, number
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import read_json
from services.wording.json_values import COUNT_OR_NONE, NAMES

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_STATES = 1
"""Number of states that a request holds. Engines keep no others from which its prompt could be continued."""
_MOST_OF_TOKEN, _MOST_OF_STATE = 1 << 28, 1 << 40
"""Most bytes of a token, and of a state, in one kind: a hundred times as many as large models have. Below them the
floor of a model with the longest context still fits into a message."""


def kv_layout(config: Mapping[str, Any], dtype_bytes: int, devices: int = 1, *, one_pool: bool) -> KvLayout:
    """The kinds of a model on each of its devices. `dtype_bytes`: bytes of a float there; `one_pool`: whether layers
    with windows keep all tokens, in one pool with the other layers. Raises BrokenCheckpoint naming a key that is
    missing or impossible, or layers whose KV is not known."""
    text = text_config(config)
    known = CLASSES.get(config["architectures"][0])
    if known is not None and known.states == MAMBA:
        return _with_mamba(text, dtype_bytes, devices)
    # Classes that are served with one pool keep keys and values alone, whatever else their files have keys for.
    if not one_pool and (key := next((key for key in UNCOUNTED_KV if text.get(key)), None)):
        raise BrokenCheckpoint(f"config.json: what a model with {key} keeps is not known")
    layers = checked_layers(number(text, "num_hidden_layers"))
    if text.get("kv_lora_rank"):
        row = number(text, "kv_lora_rank") + number(text, "qk_rope_head_dim")
        return _checked(latent(layers * row * dtype_bytes))
    counts = _layers_by_type(text, layers)
    if one_pool and _heads(text, _SLIDING) == _heads(text, _FULL):
        counts[_FULL] += counts.pop(_SLIDING)
    elif one_pool and counts[_SLIDING]:
        raise BrokenCheckpoint("config.json: layers with windows have heads of another size, which need their own pool")
    if counts.get(_SLIDING) and not counts[_FULL]:
        raise BrokenCheckpoint("config.json: every layer has a window, and engines have no pool for windows alone")
    kinds: list[KvKind] = []
    if counts[_FULL]:
        kinds.append(attention(counts[_FULL] * _keys_and_values(text, _FULL, devices) * dtype_bytes))
    if counts.get(_SLIDING):
        each = counts[_SLIDING] * _keys_and_values(text, _SLIDING, devices) * dtype_bytes
        kinds.append(window(each, number(text, "sliding_window"), BEYOND_WINDOW_TOKENS))
    if counts[_LINEAR]:
        kinds.append(state(counts[_LINEAR] * _state_bytes(text, dtype_bytes, devices), _STATES))
    if not kinds:
        raise BrokenCheckpoint("config.json leaves no layer that has KV of its own")
    return _checked(*kinds)


def _checked(*kinds: KvKind) -> KvLayout:
    """The layout of these kinds. Raises BrokenCheckpoint for sizes that no model has."""
    for kind in kinds:
        if kind.bytes_per_token > _MOST_OF_TOKEN or kind.bytes_per_state > _MOST_OF_STATE:
            nbytes, of = kind.bytes_per_token or kind.bytes_per_state, "state" if kind.states else "token"
            raise BrokenCheckpoint(f"config.json makes it KV of {nbytes} bytes for each {of}, more than any model has")
    return KvLayout(kinds)


def _with_mamba(text: Mapping[str, Any], dtype_bytes: int, devices: int) -> KvLayout:
    """The kinds of a model in which each layer is one part alone, and some are Mamba layers."""
    letters = mamba.layers(text)
    checked_layers(len(letters))
    tokens = letters.count(mamba.ATTENTION) * _keys_and_values(text, _FULL, devices) * dtype_bytes
    states = letters.count(mamba.RECURRENT) * mamba.state_bytes(text, dtype_bytes, devices)
    return _checked(attention(tokens), state(states, _STATES))


def kv_of_folder(folder: Path, dtype_bytes: int, devices: int) -> KvLayout | None:
    """The kinds that a folder's model has by its config.json; those of a class that is not served are counted with a
    pool for each. None if the file does not say."""
    try:
        config = read_json(folder / CONFIG)
        names = config.get("architectures") if isinstance(config, dict) else None
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            return None
        return kv_layout(
            config, dtype_bytes, devices, one_pool=names[0] in CLASSES and not CLASSES[names[0]].window_pool
        )
    except (BrokenCheckpoint, OSError):
        return None


def _layers_by_type(text: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Number of layers with KV of their own, by type."""
    types = text.get("layer_types")
    if types is None:
        every = number(text, "full_attention_interval") if text.get("full_attention_interval") else 1
        types = [_FULL if layer % every == 0 else _LINEAR for layer in range(1, layers + 1)]
    check(CONFIG, "layer_types", types, NAMES)
    if len(types) != layers:
        raise BrokenCheckpoint(f"config.json: layer_types has {len(types)} of {layers} layers")
    if unknown := next((each for each in types if each not in (_FULL, _SLIDING, _LINEAR)), None):
        raise BrokenCheckpoint(f"config.json: what layers of the type {unknown} keep is not known")
    shared = text.get("num_kv_shared_layers") or 0
    check(CONFIG, "num_kv_shared_layers", shared, COUNT_OR_NONE)
    own = types[: max(0, layers - shared)]
    return {kind: own.count(kind) for kind in (_FULL, _SLIDING, _LINEAR)}


def _heads(text: Mapping[str, Any], layer_type: str) -> tuple[int, int]:
    """(key-value heads, their size) of a layer of this type."""
    heads = number(text, "num_attention_heads")
    kv_heads = number(text, "num_key_value_heads", heads)
    size = number(text, "head_dim") if text.get("head_dim") is not None else number(text, "hidden_size") // heads
    if not size:
        raise BrokenCheckpoint(f"config.json: hidden_size is less than {heads} heads; no head_dim is given")
    if layer_type == _FULL and text.get("global_head_dim") is not None:
        size = number(text, "global_head_dim")
        if text.get("attention_k_eq_v") is True and text.get("num_global_key_value_heads") is not None:
            kv_heads = number(text, "num_global_key_value_heads")
    return kv_heads, size


def _keys_and_values(text: Mapping[str, Any], layer_type: str, devices: int) -> int:
    """Elements of the keys and values of a token in one layer of this type, on each device."""
    kv_heads, size = _heads(text, layer_type)
    # With more devices than heads, several devices have the same head.
    return 2 * -(-kv_heads // devices) * size


def _state_bytes(text: Mapping[str, Any], dtype_bytes: int, devices: int) -> int:
    """Bytes of the state of a request in one gated delta net, on each device."""
    keys, values = number(text, "linear_num_key_heads"), number(text, "linear_num_value_heads")
    key_size, value_size = number(text, "linear_key_head_dim"), number(text, "linear_value_head_dim")
    keys, values = -(-keys // devices), -(-values // devices)
    columns = number(text, "linear_conv_kernel_dim") - 1
    inputs = (2 * keys * key_size + values * value_size) * columns * dtype_bytes
    return inputs + values * value_size * key_size * mamba.float_bytes(text)
