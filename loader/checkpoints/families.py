"""The shape of a model by its config.json, the tensors that its checkpoint has to have, and why a model is refused.

The KV of every model that is served is a number of bytes per token. A model with another kind of attention would be
served wrongly by the same accounting, so it is refused by name, before any memory is booked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loader.checkpoints import engine_source, rope
from loader.checkpoints.classes import CLASSES, Experts, ModelClass
from loader.checkpoints.config_values import TOKEN, TOKENS, check, check_given
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import (
    COUNT,
    COUNT_OR_NONE,
    FLAG,
    FRACTION,
    NAMES,
    POSITIVE,
    TEXT,
    ValueKind,
    at_least,
    one_of,
)

T = TypeVar("T")


CONFIG = "config.json"
_FLOATS = one_of("float16", "half", "bfloat16", "float32", "float")
"""Names that torch has for the floats in which engines compute."""
_KINDS = {
    "rms_norm_eps": at_least(0),
    "rope_theta": POSITIVE,
    "partial_rotary_factor": FRACTION,
    "rope_is_neox_style": FLAG,
    "dtype": _FLOATS,
    "torch_dtype": _FLOATS,
    "tie_word_embeddings": FLAG,
    "attention_bias": FLAG,
    "mlp_bias": FLAG,
    "bias": FLAG,
    "layer_types": NAMES,
    "sliding_window": COUNT_OR_NONE,
    "use_sliding_window": FLAG,
    "max_window_layers": COUNT_OR_NONE,
    "bos_token_id": TOKEN,
    "eos_token_id": TOKENS,
    "pad_token_id": TOKEN,
    "is_matryoshka": FLAG,
}
"""Kinds of values of a config.json, by the keys that are read here or by engines, beside those that the shape and the
scaling of rotary embeddings have (`rope.py`)."""
_OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
_STATE_SPACE_KEYS = ("mamba_", "ssm_", "linear_")
_MOST_BEYOND = 16
"""Layers beyond those of the model that a checkpoint may have, to predict several tokens at once."""
_LONGEST_CONTEXT = (1 << 31) - 1
"""Most tokens of a context: what `context_tokens` of the catalogue may say."""


_LARGEST_NUMBER = (1 << 31) - 1
_MOST_LAYERS = 4096
_MOST_EXPERTS = 1 << 18
"""Most experts of a model, those of all layers together: a hundred times as many as large models have."""
_OTHER_KV = (
    *("is_encoder_decoder", "attn_type_list", "block_configs", "num_kv_shared_layers"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "swa_head_dim", "swa_num_key_value_heads"),
)
"""Keys of models whose KV is not keys and values of one size in every layer."""
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""What stands in front of names of the language model in checkpoints of wrappers: as published, and as newer
Transformers saves them."""


@dataclass(frozen=True)
class ModelShape:
    """A model's size by its config.json."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context_tokens: int
    tied: bool
    """Whether input and output embedding are one tensor, and one in memory."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model, with the defaults of its class; the whole of it if
    the model takes only text."""
    text = config.get("text_config")
    given = text if isinstance(text, dict) else config
    known = CLASSES.get(config["architectures"][0])
    return {**known.defaults, **given} if known else given


def refusal(config: Mapping[str, Any], unverified: bool = False) -> str | None:
    """Why a model with this config.json is not served, None when it may be. One line that names the kind. `unverified`:
    whether a class may be served that is not in the table; one whose KV is of another kind may not all the same."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        return "config.json names no architecture"
    name = architectures[0]
    if not name.isidentifier():
        return f"config.json: {name[:60]!r} is not the name of an architecture"
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        return "config.json has no model_type, by which engines know it"
    known = CLASSES.get(name)
    if config.get("is_encoder_decoder"):
        return f"{name} is an encoder with a decoder, which is not supported: only decoders and encoders are"
    parts = [key for key in ("vision_config", "audio_config", "text_config") if config.get(key) is not None]
    wraps = name.endswith("ForConditionalGeneration") or parts
    if wraps and not (known.wrapper if known else unverified):
        return f"{name} is multimodal, which is not supported: only text models are, and text of {_wrappers()}"
    text = text_config(config)
    layer_types = text.get("layer_types")
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else set()
    if text.get("kv_lora_rank"):
        return f"{name} has multi-head latent attention (MLA), which is not supported: its KV has no elastic form yet"
    if kinds - {"full_attention", "sliding_attention"} or any(key.startswith(_STATE_SPACE_KEYS) for key in text):
        return f"{name} is a hybrid of attention and state-space or linear layers, which is not supported"
    if not (known.windows if known else unverified) and _slides(text, kinds):
        return f"{name} has sliding-window attention, which is not supported: engines would ignore its window"
    if known is None and unverified:
        if not isinstance(config.get("text_config", {}), dict):
            return "config.json: text_config is not an object"
        if other := next((key for key in _OTHER_KV if text.get(key)), None):
            return f"{name} has KV of another kind ({other}), which is not supported"
        if text.get("v_head_dim") not in (None, text.get("head_dim")):
            return f"{name} has keys and values of different sizes, which is not supported"
        if not engine_source.has_class(name):
            return f"SGLang has no class {name}"
    if known is None and not unverified:
        return (
            f"the architecture {name} is not supported; these are: {', '.join(sorted(CLASSES))}. With unverified = true"
            " in the catalogue it is served all the same, and nobody has looked whether it answers rightly"
        )
    return None


def _wrappers() -> str:
    return ", ".join(sorted(name for name, known in CLASSES.items() if known.wrapper))


def _slides(config: Mapping[str, Any], kinds: set[str]) -> bool:
    if kinds:
        return "sliding_attention" in kinds
    window = config.get("sliding_window")
    # Qwen2 and Qwen3 write a window that they do not use; for Mistral, writing it is using it.
    unused = str(config.get("model_type", "")).startswith("qwen")
    if not window or not config.get("use_sliding_window", not unused):
        return False
    # A window as long as the context is none.
    positions = config.get("max_position_embeddings")
    if type(window) is not int or type(positions) is not int:
        return False  # `read_shape` raises an error for them
    return window < rope.context_tokens(config, positions)


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. Raises BrokenCheckpoint naming the key that is missing or impossible, of
    those that engines read too."""
    name = config["architectures"][0]
    known = CLASSES.get(name, ModelClass(""))
    if known.wrapper and not isinstance(config.get("text_config"), dict):
        raise BrokenCheckpoint("config.json has no text_config, which describes the language model")
    if known.wrapper:
        check_given(CONFIG, config, {"dtype": _FLOATS, "torch_dtype": _FLOATS, "vision_config": _OBJECT})
    config = text_config(config)
    for key in known.needs:
        if config.get(key) is None:
            raise BrokenCheckpoint(f"config.json has no {key}")
    activation = one_of(known.activation) if name in CLASSES else TEXT
    check_given(CONFIG, config, _KINDS | {"hidden_act": activation, "hidden_activation": activation})

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = default
        if value is None:
            raise BrokenCheckpoint(f"config.json has no {key}")
        check(CONFIG, key, value, COUNT)
        if value > _LARGEST_NUMBER:
            raise BrokenCheckpoint(f"config.json: {key} is larger than {_LARGEST_NUMBER}")
        return int(value)

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    kv_heads = number("num_key_value_heads", heads)
    if heads % kv_heads:
        raise BrokenCheckpoint(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads")
    if config.get("head_dim") is None and hidden % heads:
        raise BrokenCheckpoint(
            f"config.json: hidden_size {hidden} does not divide into {heads} heads; no head_dim is given"
        )
    head_dim = number("head_dim", hidden // heads)
    context = number("max_position_embeddings")
    if known.rope_by_layer:
        rope.check_by_layer(config)
    else:
        context = rope.context_tokens(config, context)
        rope.check_factors(config, head_dim)
    kinds = config.get("layer_types")
    if kinds is not None and len(kinds) != number("num_hidden_layers"):
        raise BrokenCheckpoint(f"config.json: layer_types has {len(kinds)} of {number('num_hidden_layers')} layers")
    if context > _LONGEST_CONTEXT:
        raise BrokenCheckpoint(f"config.json makes it a context of {context} tokens, more than {_LONGEST_CONTEXT}")
    return ModelShape(
        architecture=name,
        layers=_layers(number("num_hidden_layers")),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=number("vocab_size"),
        context_tokens=context,
        tied=config.get("tie_word_embeddings") is True,
    )


def _layers(count: int) -> int:
    if count > _MOST_LAYERS:
        raise BrokenCheckpoint(f"config.json: num_hidden_layers is {count}, more than {_MOST_LAYERS}")
    return count


def text_tensors(tensors: Mapping[str, T], shape: ModelShape) -> dict[str, T]:
    """Tensors of the language model by the names that `expected_tensors` has for them. Layers beyond the model's own
    are left out: they predict several tokens at once, and engines do not load them."""
    known = CLASSES[shape.architecture]
    found = {_named(name, known): tensor for name, tensor in tensors.items()}
    beyond = tuple(f"model.layers.{layer}." for layer in range(shape.layers, shape.layers + _MOST_BEYOND))
    return {name: tensor for name, tensor in found.items() if not name.startswith(beyond)}


def beside_text(name: str, shape: ModelShape) -> bool:
    """Whether a tensor is of a part that takes images, which engines load with the language model."""
    known = CLASSES.get(shape.architecture)
    return known is not None and known.wrapper and not name.startswith(("model.", "lm_head."))


def _named(name: str, known: ModelClass) -> str:
    if known.wrapper:
        for prefix in _TEXT_PREFIXES:
            if name.startswith(prefix):
                return f"model.{name.removeprefix(prefix)}"
        return name.removeprefix("language_model.").removeprefix("model.")
    if known.bare_names and name.startswith(("embed_tokens.", "layers.", "norm.")):
        return f"model.{name}"
    return name


def expected_tensors(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a whole checkpoint of this shape has, by name; tied ones once. Raises BrokenCheckpoint
    naming a key that is missing or impossible."""
    known, config = CLASSES[shape.architecture], text_config(config)
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    mixture = known.experts
    dense = _count(config, mixture.dense_layers) if mixture and mixture.dense_layers else 0
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        found = _attention(shape, known, config)
        if mixture is None or layer < dense:
            found |= _mlp(shape, known, config)
        else:
            found |= _experts(shape, mixture, config)
        found |= {f"{norm}.weight": (shape.hidden,) for norm in known.norms}
        tensors |= {prefix + name: size for name, size in found.items()}
    tensors["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return tensors


def _attention(shape: ModelShape, known: ModelClass, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inputs = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    if known.fused:
        inputs = {"qkv_proj": query + 2 * key_value}
    tensors: dict[str, tuple[int, ...]] = {}
    for name, rows in inputs.items():
        tensors |= _linear(f"self_attn.{name}", rows, shape.hidden, _has(known.qkv_bias, config))
    tensors |= _linear("self_attn.o_proj", shape.hidden, query, _has(known.output_bias, config))
    if _has(known.qk_norm, config):
        heads = (shape.heads, shape.kv_heads) if known.qk_norm_of_all else (1, 1)
        for name, together in zip(("q_norm", "k_norm"), heads, strict=True):
            tensors[f"self_attn.{name}.weight"] = (together * shape.head_dim,)
    if known.sinks:
        tensors["self_attn.sinks"] = (shape.heads,)
    return tensors


def _mlp(shape: ModelShape, known: ModelClass, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    bias = _has(known.mlp_bias, config)
    inputs = (
        {"gate_up_proj": 2 * shape.intermediate}
        if known.fused
        else dict.fromkeys(("gate_proj", "up_proj"), shape.intermediate)
    )
    tensors: dict[str, tuple[int, ...]] = {}
    for name, rows in inputs.items():
        tensors |= _linear(f"mlp.{name}", rows, shape.hidden, bias)
    return tensors | _linear("mlp.down_proj", shape.hidden, shape.intermediate, bias)


def _experts(shape: ModelShape, experts: Experts, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    count, size = _count(config, *experts.count), _count(config, experts.size)
    if shape.layers * count > _MOST_EXPERTS:
        raise BrokenCheckpoint(f"config.json has {shape.layers} layers of {count} experts, more than any model")
    tensors: dict[str, tuple[int, ...]] = {f"{experts.module}.{experts.router}.weight": (count, shape.hidden)}
    if experts.router_bias:
        tensors[f"{experts.module}.{experts.router_bias}"] = (count,)
    if experts.joined:
        return tensors | {
            f"{experts.module}.experts.gate_up_proj": (count, shape.hidden, 2 * size),
            f"{experts.module}.experts.gate_up_proj_bias": (count, 2 * size),
            f"{experts.module}.experts.down_proj": (count, size, shape.hidden),
            f"{experts.module}.experts.down_proj_bias": (count, shape.hidden),
        }
    sizes = {f"experts.{number}": size for number in range(count)}
    if experts.shared and (shared := _count(config, experts.shared)):
        sizes[experts.shared_module] = shared * size
    for name, width in sizes.items():
        for part, (rows, columns) in {
            experts.gate: (width, shape.hidden),
            experts.up: (width, shape.hidden),
            experts.down: (shape.hidden, width),
        }.items():
            tensors[f"{experts.module}.{name}.{part}.weight"] = (rows, columns)
    return tensors


def experts_of(config: Mapping[str, Any], experts: Experts) -> tuple[int, int]:
    """(experts in a layer, those of them that a token goes through). Raises BrokenCheckpoint."""
    config = text_config(config)
    count, used = _count(config, *experts.count), _count(config, experts.used)
    if not 1 <= used <= count:
        raise BrokenCheckpoint(f"config.json: {experts.used} is {used} of {count} experts")
    return count, used


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return tensors | {f"{name}.bias": (rows,)} if bias else tensors


def _has(part: bool | str, config: Mapping[str, Any]) -> bool:
    return config.get(part) is True if isinstance(part, str) else part


def _count(config: Mapping[str, Any], *keys: str) -> int:
    """The number by the first of the keys that is there."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise BrokenCheckpoint(f"config.json has no {keys[0]}")
    check(CONFIG, key, config[key], COUNT_OR_NONE)
    return int(config[key])
