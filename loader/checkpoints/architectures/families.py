"""The shape of a model by its config.json, the tensors that its checkpoint has to have, and why a model is refused.

Engines have pools for keys and values, also with heads of another shape in windows (`two_shapes.py`), for latent rows
(`latent.py`), and for states of gated delta nets and of Mamba layers (`mamba.py`). A model with any other kind of KV is
refused by name, before any memory is booked, even if `kv_of_config.py` knows the bytes of that kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from loader.checkpoints.architectures import engine_source, latent, mamba, rope, two_shapes
from loader.checkpoints.architectures.classes import CLASSES, MAMBA, Experts, ModelClass
from loader.checkpoints.architectures.latent import Latent
from loader.checkpoints.architectures.two_shapes import FullHeads, LayerParts
from loader.checkpoints.config_values import CONFIG, TOKEN, TOKENS, check, check_given, number
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

_FLOATS = one_of("float16", "half", "bfloat16", "float32", "float")
"""Names that torch has for the floats in which engines compute."""
_TIED = "tie_word_embeddings"
"""Key that says whether input and output embedding are one tensor."""
_KINDS = {
    "rms_norm_eps": at_least(0),
    "rope_theta": POSITIVE,
    "partial_rotary_factor": FRACTION,
    "rope_is_neox_style": FLAG,
    "dtype": _FLOATS,
    "torch_dtype": _FLOATS,
    _TIED: FLAG,
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
    "attn_output_gate": FLAG,
    "enable_moe_block": FLAG,
    "full_attention_interval": COUNT,
}
"""Kinds of values by their keys in config.json, for keys that this module or engines read. Not among them are the keys
of the model's shape (`read_shape`) and of its rotary embedding (`rope.py`)."""
_OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))
_STATE_SPACE_KEYS = ("mamba_", "ssm_", "linear_")
"""Beginnings of the keys of models with states: of Mamba and other state-space layers, then of linear attention."""
_MOST_BEYOND = 16
"""Most layers behind those of the model that a checkpoint may have, for predicting several tokens at once."""
_LONGEST_CONTEXT = (1 << 31) - 1
"""Most tokens of a context, as for `context_tokens` of the catalogue."""


_MOST_LAYERS = 4096
_SCORED = 2
"""Experts of a group whose scores together are the group's, where the router has a bias."""
_MOST_EXPERTS = 1 << 18
"""Most experts of a model, those of all layers together: a hundred times as many as large models have."""
UNCOUNTED_KV = (
    *("index_head_dim", "compress_ratios", "linear_attn_config", "attn_type_list", "block_configs"),
    *("hybrid_override_pattern", "mamba_num_heads", "mamba_d_state", "swa_head_dim", "swa_num_key_value_heads"),
)
"""Keys of models with KV whose size is not known here: indexes of sparse attention, compressed tokens, or states of
other kinds."""
_OTHER_KV = (
    *("is_encoder_decoder", "num_kv_shared_layers"),
    *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
    *UNCOUNTED_KV,
)
"""Keys of models in which some layers keep something else than keys and values of one size."""
_PARTIAL_ROTARY = 0.25
"""Share of a head's elements that are rotated by position in models with gated delta nets, if config.json does not
say."""
MAMBA_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
}
"""Beginnings of the published names of tensors in models with Mamba layers, by the beginnings of these names in other
models."""
_KEYS, _VALUES = "self_attn.k_proj.weight", "self_attn.v_proj.weight"
EMBEDDINGS_OF_LAYERS = "model.embed_tokens_per_layer.weight"
"""Name of the tensor with the embeddings that layers have of their own: a row for each token, for all layers."""
_TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
"""Beginnings of the names of the language model's tensors in checkpoints of wrappers: as published, and as newer
Transformers save them."""


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
    """Whether input and output embedding are one tensor, in checkpoints and in memory."""
    latent: Latent | None = None
    """Sizes of its latent attention; None: each head has keys and values of its own, of `head_dim` elements."""
    full: FullHeads | None = None
    """Heads of its layers without a window, if they differ from those of layers with one; None: all layers have heads
    alike."""
    parts: LayerParts | None = None
    """Parts in which the layers of a model with two shapes of heads differ; None for other models."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model, or all of it if the model takes only text, with the
    defaults of its class."""
    text = config.get("text_config")
    given = text if isinstance(text, dict) else config
    known = CLASSES.get(config["architectures"][0])
    if known is None:
        return given
    beside = {_TIED: config.get(_TIED, False)} if known.tied_beside_text else {}
    return {**known.defaults, **given, **beside}


def refusal(config: Mapping[str, Any], unverified: bool = False) -> str | None:
    """Why a model with this config.json is not served, in one line that names its kind; None if it may be served.
    `unverified`: whether a class that is not in the table may be served, unless its KV is of a kind without a pool.

    Checks come in this order: class and wrapper, latent attention, states, windows, and faults that only a class which
    is not in the table may have."""
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
    if why := latent.refusal(name, text, served=known is not None and known.latent):
        return why
    attend = {"full_attention", "sliding_attention"}
    if known and known.states == MAMBA:
        attend, recurrent = kinds, [key for key in text if key.startswith(_STATE_SPACE_KEYS[2])]
    elif known and known.states:
        attend, kept = {"full_attention", "linear_attention"}, ("mamba_ssm_dtype",)
        recurrent = [key for key in text if key.startswith(_STATE_SPACE_KEYS[:2]) and key not in kept]
    else:
        recurrent = [key for key in text if key.startswith(_STATE_SPACE_KEYS)]
    if kinds - attend or recurrent:
        return f"{name} is a hybrid of attention and state-space or linear layers, which is not supported"
    if not (known.windows if known else unverified) and _slides(text, kinds):
        return f"{name} has sliding-window attention, which is not supported: engines would ignore its window"
    if known is not None and known.two_shapes and (why := two_shapes.refusal(name, text)):
        return why
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
    """The shape that a config.json describes. Raises BrokenCheckpoint naming a key that is missing or impossible, also
    if only engines read it."""
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
    for key, allowed in known.values.items():
        if config.get(key) not in allowed:
            found, wanted = config.get(key), " or ".join(map(repr, allowed))
            raise BrokenCheckpoint(f"config.json: {key} = {found!r} is not {wanted}, which engines have for {name}")
    activation = one_of(known.activation) if name in CLASSES else TEXT
    check_given(CONFIG, config, _KINDS | {"hidden_act": activation, "hidden_activation": activation})

    heads, hidden = number(config, "num_attention_heads"), number(config, "hidden_size")
    kv_heads = number(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise BrokenCheckpoint(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads")
    sizes = latent.read(config) if known.latent else None
    if sizes is None and config.get("head_dim") is None and hidden % heads:
        raise BrokenCheckpoint(
            f"config.json: hidden_size {hidden} does not divide into {heads} heads; no head_dim is given"
        )
    head_dim = number(config, "head_dim", hidden // heads) if sizes is None else sizes.query
    context = number(config, "max_position_embeddings")
    if known.rope_by_layer:
        rope.check_by_layer(config)
    else:
        context = rope.context_tokens(config, context)
        rope.check_factors(config, head_dim)
    if known.states == MAMBA:
        mamba.check_config(config)
    elif known.states:
        _check_states(config)
    layers = len(mamba.layers(config)) if known.states == MAMBA else number(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None and len(kinds) != layers:
        raise BrokenCheckpoint(f"config.json: layer_types has {len(kinds)} of {layers} layers")
    if context > _LONGEST_CONTEXT:
        raise BrokenCheckpoint(f"config.json makes it a context of {context} tokens, more than {_LONGEST_CONTEXT}")
    return ModelShape(
        architecture=name,
        layers=checked_layers(layers),
        hidden=hidden,
        # The key may be missing in a class whose layers all have experts with keys of their own for sizes.
        intermediate=number(config, "intermediate_size", 1 if known.experts and known.experts.shared_size else None),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=number(config, "vocab_size"),
        context_tokens=context,
        tied=config.get(_TIED) is True,
        latent=sizes,
        full=two_shapes.read(config, heads, kv_heads) if known.two_shapes else None,
        parts=two_shapes.read_parts(config, number(config, "num_hidden_layers")) if known.two_shapes else None,
    )


def _check_states(config: Mapping[str, Any]) -> None:
    """Raises BrokenCheckpoint if engines would compute something else than the configuration of a model with gated
    delta nets describes."""
    every, kinds = config["full_attention_interval"], config.get("layer_types")
    names = ("full_attention", "linear_attention")
    if kinds is not None and kinds != [names[layer % every != 0] for layer in range(1, len(kinds) + 1)]:
        raise BrokenCheckpoint(f"config.json: layer_types is not one layer with full attention in {every}")
    keys, values = _count(config, "linear_num_key_heads"), _count(config, "linear_num_value_heads")
    if not keys or values % keys:
        raise BrokenCheckpoint(f"config.json: {values} value heads of linear layers cannot share {keys} key heads")
    if config.get("attn_output_gate") is False:
        raise BrokenCheckpoint("config.json: attn_output_gate = false is not supported")
    if config.get("output_gate_type") not in (None, "swish", "silu"):
        raise BrokenCheckpoint(f"config.json: output_gate_type = {config['output_gate_type']!r} is not supported")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise BrokenCheckpoint("config.json: layers without experts among others (mlp_only_layers) are not supported")
    positions = config.get("rope_parameters") or config.get("rope_scaling") or {}
    # Engines look for these keys beside rope_parameters, not in it, and else take the default.
    for key, default in (("partial_rotary_factor", _PARTIAL_ROTARY), ("rope_theta", None)):
        inside = positions.get(key) if isinstance(positions, dict) else None
        beside = config.get(key, default)
        if None not in (inside, beside) and inside != beside:
            raise BrokenCheckpoint(f"config.json: {key} is {beside}, and {inside} in rope_parameters")


def checked_layers(count: int) -> int:
    """The number of a model's layers. Raises BrokenCheckpoint for more than any model has."""
    if count > _MOST_LAYERS:
        raise BrokenCheckpoint(f"config.json: num_hidden_layers is {count}, more than {_MOST_LAYERS}")
    return count


def text_tensors(tensors: Mapping[str, T], shape: ModelShape) -> dict[str, T]:
    """Tensors of a checkpoint, named as in `expected_tensors`. Layers behind the model's own are left out: they predict
    several tokens at once, and engines do not load them."""
    known = CLASSES[shape.architecture]
    found = {_named(name, known): tensor for name, tensor in tensors.items()}
    beyond = tuple(f"model.layers.{layer}." for layer in range(shape.layers, shape.layers + _MOST_BEYOND))
    return {name: tensor for name, tensor in found.items() if not name.startswith(beyond)}


def beside_text(name: str, shape: ModelShape) -> bool:
    """Whether a tensor, named as in `text_tensors`, is of the part that takes images. Engines load that part too."""
    known = CLASSES.get(shape.architecture)
    # "mtp." are layers that predict several tokens at once, which engines do not load.
    return known is not None and known.wrapper and not name.startswith(("model.", "lm_head.", "mtp."))


def _named(name: str, known: ModelClass) -> str:
    """The name of a tensor as in `expected_tensors`, from its name in a checkpoint."""
    if known.wrapper:
        for prefix in _TEXT_PREFIXES:
            if name.startswith(prefix):
                return f"model.{name.removeprefix(prefix)}"
        return name.removeprefix("language_model.").removeprefix("model.")
    if known.states == MAMBA:
        for ours, published in MAMBA_NAMES.items():
            if name.startswith(published):
                return f"{ours}{name.removeprefix(published)}"
    if known.bare_names and name.startswith(("embed_tokens.", "layers.", "norm.")):
        return f"model.{name}"
    return name


def expected_tensors(shape: ModelShape, config: Mapping[str, Any], joined: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a whole checkpoint of this shape has, by name; tied embeddings are one tensor.
    `joined`: whether the experts of a layer are joined, if the class allows both (`has_joined`). Raises
    BrokenCheckpoint naming a key that is missing or impossible."""
    known, config, mixture = CLASSES[shape.architecture], text_config(config), mixture_of(config)
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    dense = _count(config, mixture.dense_layers) if mixture and mixture.dense_layers else 0
    letters = mamba.layers(config) if known.states == MAMBA else ""
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        if letters:
            part = _part_alone(letters[layer], shape, known, config)
            tensors |= {prefix + name: size for name, size in {**part, "norm.weight": (shape.hidden,)}.items()}
            continue
        attends = not known.states or (layer + 1) % config["full_attention_interval"] == 0
        if attends:
            found = _attention(_heads_of(shape, config, layer), known, config)
            for name in _unused_kv_tensors(shape, layer):
                found.pop(name, None)
        else:
            found = _linear_attention(shape, known, config)
        experts = mixture if layer >= dense else None
        if experts is not None:
            found |= _experts(shape, experts, config, joined)
        if experts is None or experts.beside:
            found |= _mlp(_with_width(shape, layer), known, config)
        if shape.parts is not None and (own := shape.parts.embedding):
            found |= _linear("per_layer_input_gate", own, shape.hidden, False)
            found |= _linear("per_layer_projection", shape.hidden, own, False)
            found["post_per_layer_input_norm.weight"] = (shape.hidden,)
        norms = (*known.norms, *(experts.beside if experts is not None else ()))
        found |= {f"{norm}.weight": (shape.hidden,) for norm in norms}
        if known.layer_scalar:
            found["layer_scalar"] = (1,)
        tensors |= {prefix + name: size for name, size in found.items()}
    tensors["model.norm.weight"] = (shape.hidden,)
    if shape.parts is not None and (own := shape.parts.embedding):
        every = shape.layers * own
        tensors[EMBEDDINGS_OF_LAYERS] = (shape.parts.tokens, every)
        tensors |= _linear("model.per_layer_model_projection", every, shape.hidden, False)
        tensors["model.per_layer_projection_norm.weight"] = (own,)
    if not shape.tied:
        tensors["lm_head.weight"] = (shape.vocabulary, shape.hidden)
    return tensors


def _part_alone(
    letter: str, shape: ModelShape, known: ModelClass, config: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a layer that is one part alone, without its norm. `letter`: kind of the part
    (`mamba.py`)."""
    if letter == mamba.EXPERTS:
        assert known.experts is not None
        return _experts(shape, known.experts, config, joined=False)
    if letter == mamba.RECURRENT:
        return {f"mixer.{name}": size for name, size in mamba.tensors(config, shape.hidden).items()}
    part = _attention(shape, known, config) if letter == mamba.ATTENTION else _mlp(shape, known, config)
    return {f"mixer.{name.partition('.')[2]}": size for name, size in part.items()}


def held_beside(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that engines hold even if a checkpoint lacks it, by name: projections of keys and values in
    layers that use the KV of others, which no step reads, and projections of values where values are keys, which are
    copies of those of keys."""
    known, config = CLASSES[shape.architecture], text_config(config)
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers if shape.full is not None else 0):
        heads = _heads_of(shape, config, layer)
        attention = _attention(heads, known, config)
        unused = _unused_kv_tensors(shape, layer)
        same = {_VALUES: attention[_KEYS]} if heads.full is not None and heads.full.values_are_keys else {}
        beside = same | {name: attention[name] for name in unused if name in attention}
        found |= {f"model.layers.{layer}.{name}": size for name, size in beside.items()}
    return found


def _unused_kv_tensors(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Names of the tensors that would make a layer's keys and values, if the layer uses those of another; else none."""
    if shape.parts is None or layer < shape.parts.own_kv:
        return ()
    return (_KEYS, _VALUES, "self_attn.k_norm.weight")


def _with_width(shape: ModelShape, layer: int) -> ModelShape:
    """The shape with the width of the MLP in layer number `layer`."""
    wide = shape.parts is not None and shape.parts.wide and layer >= shape.parts.own_kv
    return replace(shape, intermediate=2 * shape.intermediate) if wide else shape


def _heads_of(shape: ModelShape, config: Mapping[str, Any], layer: int) -> ModelShape:
    """The shape with the heads of layer number `layer`. `full` is kept for a layer without a window, else None."""
    if shape.full is None or config["layer_types"][layer] == "sliding_attention":
        return replace(shape, full=None)
    return replace(shape, kv_heads=shape.full.kv_heads, head_dim=shape.full.head_dim)


def kv_heads_of(name: str, shape: ModelShape, config: Mapping[str, Any]) -> int:
    """Number of key-value heads in the layer of a tensor, which is named as in `expected_tensors`."""
    if shape.full is None:
        return shape.kv_heads
    return _heads_of(shape, text_config(config), int(name.removeprefix("model.layers.").partition(".")[0])).kv_heads


def linear_heads(shape: ModelShape, config: Mapping[str, Any]) -> tuple[int, int]:
    """(number of key heads, number of value heads) in layers with linear attention; (0, 0) for a model without such
    layers. Raises BrokenCheckpoint."""
    known = CLASSES.get(shape.architecture)
    if known is None or known.states in ("", MAMBA):
        return 0, 0
    text = text_config(config)
    return _count(text, "linear_num_key_heads"), _count(text, "linear_num_value_heads")


def heads_beside_text(config: Mapping[str, Any]) -> int:
    """Number of attention heads in the part that takes images, which engines divide too; 0 if there is no such part, or
    its configuration does not say."""
    images = config.get("vision_config")
    given = images if isinstance(images, dict) else {}
    return next((given[key] for key in ("num_attention_heads", "num_heads") if type(given.get(key)) is int), 0)


def _attention(shape: ModelShape, known: ModelClass, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    if shape.latent is not None:
        return latent.tensors(shape.latent, shape.heads, shape.hidden)
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inputs = {"q_proj": query * (2 if known.query_gate else 1), "k_proj": key_value, "v_proj": key_value}
    if known.fused:
        inputs = {"qkv_proj": query + 2 * key_value}
    if shape.full is not None and shape.full.values_are_keys:
        del inputs["v_proj"]
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


def _linear_attention(shape: ModelShape, known: ModelClass, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a gated delta net, by their names within the layer."""
    keys, values = _count(config, "linear_num_key_heads"), _count(config, "linear_num_value_heads")
    key_rows = keys * _count(config, "linear_key_head_dim")
    value_size = _count(config, "linear_value_head_dim")
    value_rows, mixed = values * value_size, 2 * key_rows + values * value_size
    inputs = {"in_proj_qkvz": mixed + value_rows, "in_proj_ba": 2 * values}
    if known.states == "split":
        inputs = {"in_proj_qkv": mixed, "in_proj_z": value_rows, "in_proj_b": values, "in_proj_a": values}
    tensors: dict[str, tuple[int, ...]] = {
        f"linear_attn.{name}.weight": (rows, shape.hidden) for name, rows in inputs.items()
    }
    return tensors | {
        "linear_attn.conv1d.weight": (mixed, 1, _count(config, "linear_conv_kernel_dim")),
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
        "linear_attn.norm.weight": (value_size,),
        "linear_attn.out_proj.weight": (shape.hidden, value_rows),
    }


def has_joined(tensors: Mapping[str, Any], shape: ModelShape) -> bool:
    """Whether the experts of each layer are joined in this checkpoint of a class that allows both. `tensors`: named as
    in `text_tensors`."""
    mixture = CLASSES[shape.architecture].experts
    if mixture is None or not mixture.joined_too:
        return False
    return f"model.layers.0.{_within(mixture)}experts.gate_up_proj" in tensors


def _within(experts: Experts) -> str:
    """Beginning of the names of router and experts within a layer; empty if they are in no module of their own."""
    return f"{experts.module}." if experts.module else ""


def _mlp(shape: ModelShape, known: ModelClass, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    bias = _has(known.mlp_bias, config)
    inputs = dict.fromkeys(("gate_proj", "up_proj"), shape.intermediate)
    if known.fused:
        inputs = {"gate_up_proj": 2 * shape.intermediate}
    if known.states == MAMBA:
        del inputs["gate_proj"]
    tensors: dict[str, tuple[int, ...]] = {}
    for name, rows in inputs.items():
        tensors |= _linear(f"mlp.{name}", rows, shape.hidden, bias)
    return tensors | _linear("mlp.down_proj", shape.hidden, shape.intermediate, bias)


def _experts(
    shape: ModelShape, experts: Experts, config: Mapping[str, Any], joined: bool
) -> dict[str, tuple[int, ...]]:
    count, size, module = _count(config, *experts.count), _count(config, experts.size), _within(experts)
    if shape.layers * count > _MOST_EXPERTS:
        raise BrokenCheckpoint(f"config.json has {shape.layers} layers of {count} experts, more than any model")
    tensors: dict[str, tuple[int, ...]] = {f"{module}{experts.router}.weight": (count, shape.hidden)}
    if experts.router_scales:
        tensors |= {f"{module}router.scale": (shape.hidden,), f"{module}router.per_expert_scale": (count,)}
    if experts.router_bias:
        tensors[f"{module}{experts.router_bias}"] = (count,)
    if experts.joined:
        return tensors | {
            f"{module}experts.gate_up_proj": (count, shape.hidden, 2 * size),
            f"{module}experts.gate_up_proj_bias": (count, 2 * size),
            f"{module}experts.down_proj": (count, size, shape.hidden),
            f"{module}experts.down_proj_bias": (count, shape.hidden),
        }
    sizes = {f"experts.{number}": size for number in range(count)}
    if joined:
        sizes.clear()
        tensors[f"{module}experts.gate_up_proj"] = (count, 2 * size, shape.hidden)
        tensors[f"{module}experts.down_proj"] = (count, shape.hidden, size)
    if experts.shared_gate:
        tensors[f"{module}{experts.shared_gate}.weight"] = (1, shape.hidden)
    shared = _count(config, experts.shared) if experts.shared else int(bool(experts.shared_size))
    if shared:
        sizes[experts.shared_module] = shared * (_count(config, experts.shared_size) if experts.shared_size else size)
    latent_size = _count(config, experts.latent_size) if config.get(experts.latent_size) else 0
    if latent_size:
        tensors[f"{module}fc1_latent_proj.weight"] = (latent_size, shape.hidden)
        tensors[f"{module}fc2_latent_proj.weight"] = (shape.hidden, latent_size)
    for name, width in sizes.items():
        input_size = latent_size if latent_size and name != experts.shared_module else shape.hidden
        for part in filter(None, (experts.gate, experts.up)):
            tensors[f"{module}{name}.{part}.weight"] = (width, input_size)
        tensors[f"{module}{name}.{experts.down}.weight"] = (input_size, width)
    return tensors


def mixture_of(config: Mapping[str, Any]) -> Experts | None:
    """The mixture of experts in a model's layers; None if it has none, or its class is not in the table."""
    known, config = CLASSES.get(config["architectures"][0]), text_config(config)
    if known is None or known.experts is None:
        return None
    if known.states == MAMBA:
        return known.experts if mamba.EXPERTS in mamba.layers(config) else None
    only_if = known.experts.only_if
    return known.experts if not only_if or config.get(only_if) is True else None


def experts_of(config: Mapping[str, Any], experts: Experts) -> tuple[int, int]:
    """(number of experts in a layer, number of them that a token goes through). Raises BrokenCheckpoint."""
    config = text_config(config)
    count, used = _count(config, *experts.count), _count(config, experts.used)
    if not 1 <= used <= count:
        raise BrokenCheckpoint(f"config.json: {experts.used} is {used} of {count} experts")
    if config.get("n_group") is not None:
        _check_groups(config, experts, count, used)
    return count, used


def _check_groups(config: Mapping[str, Any], experts: Experts, count: int, used: int) -> None:
    """Raises BrokenCheckpoint if no token could choose `used` of `count` experts: first its best `topk_group` groups of
    them, then its best experts in these groups."""
    check_given(CONFIG, config, {"n_group": COUNT, "topk_group": COUNT, "routed_scaling_factor": POSITIVE})
    groups = int(config["n_group"])
    best = 1 if config.get("topk_group") is None else int(config["topk_group"])
    if count % groups:
        raise BrokenCheckpoint(f"config.json: {count} experts cannot be divided into n_group = {groups} groups")
    if best > groups:
        raise BrokenCheckpoint(f"config.json: topk_group is {best} of n_group = {groups} groups")
    size = count // groups
    if used > best * size:
        raise BrokenCheckpoint(
            f"config.json: {experts.used} is {used}, and topk_group = {best} groups have {best * size}"
        )
    if size < _SCORED and experts.router_bias:
        raise BrokenCheckpoint(f"config.json: n_group = {groups} groups of {size} have no {_SCORED} best experts each")


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return tensors | {f"{name}.bias": (rows,)} if bias else tensors


def _has(part: bool | str, config: Mapping[str, Any]) -> bool:
    return config.get(part) is True if isinstance(part, str) else part


def _count(config: Mapping[str, Any], *keys: str) -> int:
    """The number under the first of the keys that config.json has. Raises BrokenCheckpoint if it has none."""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise BrokenCheckpoint(f"config.json has no {keys[0]}")
    check(CONFIG, key, config[key], COUNT_OR_NONE)
    return int(config[key])
