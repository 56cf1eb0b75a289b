"""The model classes that engines serve: one entry for each, with what its checkpoints have beside what all have.

All are decoders whose KV is a number of bytes per token: keys and values of one size in every layer. Encoders have a
table of their own (`encoders.py`). A class that is in neither is refused by name, before any memory is booked, unless
the catalogue says `unverified = true`; `docs/guide/models.md` has this table for users, and CONTRIBUTING.md the steps
to add a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a class's layers. Keys are those of config.json."""

    count: tuple[str, ...]
    """Keys of the number of experts in a layer: as published, and as newer Transformers save it."""
    size: str
    """Key of an expert's intermediate size."""
    module: str = "mlp"
    """Name of the module that holds router and experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    """Name of the router."""
    router_bias: str = ""
    """Name, within the module, of a bias of the router, which every layer with experts has; empty: there is none."""
    joined: bool = False
    """Whether all experts of a layer are one tensor for gate and up projection together, and one for down, with
    biases."""
    used: str = "num_experts_per_tok"
    """Key of the number of experts that the router picks for a token; shared experts are not counted."""
    shared: str = ""
    """Key of the number of experts that serve every token; empty: there are none."""
    shared_module: str = "shared_experts"
    """Name of the module of those."""
    dense_layers: str = ""
    """Key of the number of layers at the beginning that have no experts; empty: all have."""


@dataclass(frozen=True)
class ModelClass:
    """One class of SGLang's. A bias, or a norm of queries and keys: True: always there; False: never; a string: the key
    of config.json that says whether."""

    models: str
    """Published models of this class, as users know them."""
    verified: tuple[str, ...] = ()
    """"CPU", "GPU": where answers were compared with those of another implementation, with weights of floats."""
    quantised: tuple[str, ...] = ()
    """Formats of quantised weights with which they were compared, on a GPU."""
    gpu_only: bool = False
    """Whether engines on CPUs have no kernels for the class."""
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool | str = False
    qk_norm_of_all: bool = False
    """Whether queries and keys are normalised over all heads together; else each head is."""
    sinks: bool = False
    """Whether attention has a sink for each head."""
    adapters: bool = False
    """Whether adapters (LoRA) of such models are served: their answers were compared with those of merged weights."""
    fused: bool = False
    """Whether queries, keys and values are one tensor in checkpoints, and so are gate and up projection."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of a layer, of the hidden size."""
    activation: str = "silu"
    """Value of `hidden_act`: the one that engines have for the class."""
    needs: tuple[str, ...] = ()
    """Keys of config.json without which engines fail, beside those of the model's shape."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that published configurations leave out, as Transformers has them."""
    rope_by_layer: bool = False
    """Whether rotary embeddings may differ by kind of layer. `max_position_embeddings` is then the whole context,
    whatever factors stretch it."""
    experts: Experts | None = None
    windows: bool = False
    """Whether layers with sliding windows are served. Their KV lies in one pool with that of the other layers, so a
    window saves compute and no memory."""
    wrapper: bool = False
    """Whether the class takes images too, and its language model is described by `text_config`. Text is served; the
    other parts lie in memory with the weights."""
    bare_names: bool = False
    """Whether engines also read checkpoints whose names lack "model." in front, as those of embedding models do."""


_BOTH = ("CPU", "GPU")
_GEMMA_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GELU = "gelu_pytorch_tanh"
_GEMMA_3: dict[str, Any] = {
    "qk_norm": True,
    "norms": _GEMMA_NORMS,
    "activation": _GELU,
    "windows": True,
    "rope_by_layer": True,
    "defaults": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    },
}

CLASSES = {
    "LlamaForCausalLM": ModelClass(
        "Llama 2 and 3, and models made like them",
        _BOTH,
        ("FP8", "INT8", "INT4", "AWQ", "GPTQ"),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        adapters=True,
    ),
    "MistralForCausalLM": ModelClass("Mistral, without a sliding window", _BOTH, adapters=True),
    "Qwen2ForCausalLM": ModelClass("Qwen 2 and 2.5, distilled R1", _BOTH, qkv_bias=True, adapters=True),
    "Qwen3ForCausalLM": ModelClass(
        "Qwen 3",
        _BOTH,
        ("FP8", "FP8 in blocks"),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        adapters=True,
        bare_names=True,
    ),
    "Phi3ForCausalLM": ModelClass("Phi 3 and 4, without a sliding window", _BOTH, fused=True),
    "Gemma2ForCausalLM": ModelClass(
        "Gemma 2",
        _BOTH,
        norms=_GEMMA_NORMS,
        activation=_GELU,
        adapters=True,
        needs=("hidden_act",),
        defaults={"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True},
        windows=True,
    ),
    "Gemma3ForCausalLM": ModelClass("Gemma 3 1B and other text models", _BOTH, adapters=True, **_GEMMA_3),
    "Gemma3ForConditionalGeneration": ModelClass("Gemma 3 4B to 27B, text", _BOTH, wrapper=True, **_GEMMA_3),
    "Mistral3ForConditionalGeneration": ModelClass("Mistral Small 3.1 and 3.2, Devstral, text", _BOTH, wrapper=True),
    "Qwen3VLForConditionalGeneration": ModelClass(
        "Qwen 3 VL, text", _BOTH, qk_norm=True, wrapper=True, needs=("head_dim",)
    ),
    "MixtralForCausalLM": ModelClass(
        "Mixtral",
        _BOTH,
        ("FP8",),
        experts=Experts(
            ("num_local_experts",), "intermediate_size", module="block_sparse_moe", gate="w1", up="w3", down="w2"
        ),
    ),
    "Qwen3MoeForCausalLM": ModelClass(
        "Qwen 3 mixtures: 30B-A3B, 235B-A22B, Coder",
        _BOTH,
        ("FP8 in blocks", "INT4", "AWQ"),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        experts=Experts(("num_experts", "num_local_experts"), "moe_intermediate_size"),
    ),
    "Glm4MoeForCausalLM": ModelClass(
        "GLM 4.5, 4.5 Air, 4.6, 4.7",
        _BOTH,
        ("FP8 in blocks",),
        qkv_bias="attention_bias",
        qk_norm="use_qk_norm",
        experts=Experts(
            ("n_routed_experts", "num_local_experts"),
            "moe_intermediate_size",
            router_bias="gate.e_score_correction_bias",
            shared="n_shared_experts",
            dense_layers="first_k_dense_replace",
        ),
    ),
    "HYV3ForCausalLM": ModelClass(
        "Hy3",
        _BOTH,
        qk_norm="qk_norm",
        needs=("qk_norm", "route_norm", "first_k_dense_replace"),
        experts=Experts(
            ("num_experts", "num_local_experts"),
            "moe_intermediate_size",
            router="router.gate",
            router_bias="expert_bias",
            shared="num_shared_experts",
            shared_module="shared_mlp",
            dense_layers="first_k_dense_replace",
        ),
    ),
    "MiniMaxM2ForCausalLM": ModelClass(
        "MiniMax M2",
        (),
        ("FP8 in blocks",),
        gpu_only=True,
        qk_norm="use_qk_norm",
        qk_norm_of_all=True,
        needs=("head_dim",),
        experts=Experts(
            ("num_local_experts",),
            "intermediate_size",
            module="block_sparse_moe",
            gate="w1",
            up="w3",
            down="w2",
            router_bias="e_score_correction_bias",
        ),
    ),
    "GptOssForCausalLM": ModelClass(
        "gpt-oss 20b and 120b",
        (),
        ("MXFP4",),
        gpu_only=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        sinks=True,
        windows=True,
        defaults={"head_dim": 64, "attention_bias": True},
        experts=Experts(
            ("num_local_experts",), "intermediate_size", router="router", router_bias="router.bias", joined=True
        ),
    ),
}
"""The classes by the name that config.json gives in `architectures`."""


_NONE = "\u2013"


def markdown() -> str:
    """The table of `docs/guide/models.md`."""
    rows = [
        f"| {known.models} | `{name}` | {_notes(known)} | {', '.join(known.verified) or _NONE} |"
        f" {', '.join(known.quantised) or _NONE} |"
        for name, known in sorted(CLASSES.items(), key=lambda item: (item[1].wrapper, bool(item[1].experts), item[0]))
    ]
    return "\n".join(
        ["| models | class | kind | compared on | and on a GPU, quantised to |", "|---|---|---|---|---|", *rows]
    )


def _notes(known: ModelClass) -> str:
    notes = [
        "mixture of experts" if known.experts else "",
        "windows in one pool" if known.windows else "",
        "text in, text out" if known.wrapper else "",
        "on GPUs only" if known.gpu_only else "",
        "adapters" if known.adapters else "",
    ]
    return ", ".join(filter(None, notes)) or _NONE
