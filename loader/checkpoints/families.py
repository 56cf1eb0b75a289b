"""The model families that engines hold elastically today, and why others are refused.

All of them are decoders with full attention over keys and values of one size per layer: their KV is a number of bytes
per token. A model with another kind of attention would be served wrongly by the same accounting, so it is refused by
name, before any memory is booked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from loader.checkpoints import rope
from loader.checkpoints.config_values import TOKEN, TOKENS, check, check_given
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.values import COUNT, COUNT_OR_NONE, FLAG, FRACTION, NAMES, POSITIVE, at_least, one_of

T = TypeVar("T")


@dataclass(frozen=True)
class Family:
    """Tensors that a family's layers have beside the common ones. A bias is there always, never, or as a key of
    config.json says."""

    qkv_bias: bool | str
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    bare_names: bool = False
    """Whether engines also read checkpoints whose names lack "model." in front, as those of embedding models do."""


FAMILIES = {
    "LlamaForCausalLM": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(qkv_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True),
    "Qwen3ForCausalLM": Family(qkv_bias="attention_bias", output_bias="attention_bias", qk_norm=True, bare_names=True),
}
CONFIG = "config.json"
_FLOATS = one_of("float16", "half", "bfloat16", "float32", "float", "float64", "double")
"""Names that torch has for the floats that weights may consist of (`weight_files.FLOATS`)."""
_KINDS = {
    "hidden_act": one_of("silu"),  # engines have no other for these families
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
"""Kinds of values of a config.json, by the keys that are read here or by engines; shape and rotary embedding aside."""
_STATE_SPACE_KEYS = ("mamba_", "ssm_", "linear_")
_LONGEST_CONTEXT = (1 << 31) - 1
"""Most tokens of a context: what `context_tokens` of the catalogue may say."""


@dataclass(frozen=True)
class ModelShape:
    """What config.json says of a model's size."""

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


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a model with this config.json is not served, None when it may be. One line that names the kind."""
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        return "config.json names no architecture"
    name = architectures[0]
    layer_types = config.get("layer_types")
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else set()
    if name.endswith("ForConditionalGeneration") or {"vision_config", "audio_config", "text_config"} & set(config):
        return f"{name} is multimodal, which is not supported: only text models are"
    if config.get("kv_lora_rank"):
        return f"{name} has multi-head latent attention (MLA), which is not supported: its KV has no elastic form yet"
    if kinds - {"full_attention", "sliding_attention"} or any(key.startswith(_STATE_SPACE_KEYS) for key in config):
        return f"{name} is a hybrid of attention and state-space or linear layers, which is not supported"
    if _slides(config, kinds):
        return f"{name} has sliding-window attention, which is not supported: its KV has no elastic form yet"
    if config.get("quantization_config"):
        quantised = config["quantization_config"]
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
        return f"{name} is quantised ({method}), which is not supported: give the unquantised checkpoint"
    if name not in FAMILIES:
        return f"the architecture {name} is not supported; these are: {', '.join(sorted(FAMILIES))}"
    return None


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
    check_given(CONFIG, config, _KINDS)

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = default
        if value is None:
            raise BrokenCheckpoint(f"config.json has no {key}")
        check(CONFIG, key, value, COUNT)
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
    context = rope.context_tokens(config, number("max_position_embeddings"))
    rope.check_factors(config, head_dim)
    if context > _LONGEST_CONTEXT:
        raise BrokenCheckpoint(f"config.json makes it a context of {context} tokens, more than {_LONGEST_CONTEXT}")
    return ModelShape(
        architecture=config["architectures"][0],
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=number("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=number("vocab_size"),
        context_tokens=context,
        tied=config.get("tie_word_embeddings") is True,
    )


def named(tensors: Mapping[str, T], shape: ModelShape) -> Mapping[str, T]:
    """Tensors by the names that `expected_tensors` has for them."""
    if not FAMILIES[shape.architecture].bare_names:
        return tensors
    bare = ("embed_tokens.", "layers.", "norm.")
    return {f"model.{name}" if name.startswith(bare) else name: tensor for name, tensor in tensors.items()}


def expected_tensors(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a whole checkpoint of this shape has, by name; tied ones once."""
    family = FAMILIES[shape.architecture]

    def has(bias: bool | str) -> bool:
        return config.get(bias) is True if isinstance(bias, str) else bias

    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears: dict[str, tuple[int, int, bool]] = {
        "self_attn.q_proj": (query, shape.hidden, has(family.qkv_bias)),
        "self_attn.k_proj": (key_value, shape.hidden, has(family.qkv_bias)),
        "self_attn.v_proj": (key_value, shape.hidden, has(family.qkv_bias)),
        "self_attn.o_proj": (shape.hidden, query, has(family.output_bias)),
        "mlp.gate_proj": (shape.intermediate, shape.hidden, has(family.mlp_bias)),
        "mlp.up_proj": (shape.intermediate, shape.hidden, has(family.mlp_bias)),
        "mlp.down_proj": (shape.hidden, shape.intermediate, has(family.mlp_bias)),
    }
    norms = {"input_layernorm": shape.hidden, "post_attention_layernorm": shape.hidden}
    if family.qk_norm:
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}

    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in linears.items():
            tensors[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                tensors[f"{prefix}{name}.bias"] = (rows,)
        for name, size in norms.items():
            tensors[f"{prefix}{name}.weight"] = (size,)
    tensors["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return tensors
