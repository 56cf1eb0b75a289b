"""The table of the model classes that engines serve. An entry says how checkpoints of a class differ from those of a
plain decoder.

All classes here are decoders, whose kinds of KV `kv_of_config.py` reads; `encoders.py` has those of encoders. Any other
class is refused by name, before any memory is booked, unless the catalogue says `unverified = true`.
`docs/guide/models.md` has this table for users, and CONTRIBUTING.md the steps to add a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAMBA = "mamba"
"""Value of `ModelClass.states` for Mamba layers, in models in which every layer is one part alone (`mamba.py`)."""


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in a class's layers. Keys are keys of config.json; names are those of modules and tensors
    in checkpoints."""

    count: tuple[str, ...]
    """Keys of the number of experts in a layer: the published one first, then that of newer Transformers."""
    size: str
    """Key of an expert's intermediate size."""
    module: str = "mlp"
    """Name of the module in which router and experts are; empty: they are in the layer itself."""
    gate: str = "gate_proj"
    """Name of the projection whose activated output scales the output of `up`; empty: there is none, and the output of
    `up` is activated itself."""
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    """Name of the router."""
    router_bias: str = ""
    """Name, within the module, of the bias of the router in every layer with experts; empty: there is none."""
    router_scales: bool = False
    """Whether the router has a factor for each element of its input, and one for the output of each expert."""
    joined: bool = False
    """Whether all experts of a layer are one tensor for gate and up projection together, and one for down, with
    biases."""
    used: str = "num_experts_per_tok"
    """Key of the number of experts that the router picks for a token, without the shared ones."""
    shared: str = ""
    """Key of the number of experts that serve every token; empty: there are none."""
    shared_module: str = "shared_experts"
    """Name of the module of the shared experts."""
    shared_size: str = ""
    """Key of the intermediate size of one shared expert; empty: it is that of the other experts."""
    shared_gate: str = ""
    """Name of the gate that scales the shared expert's output for each token; empty: there is none."""
    latent_size: str = ""
    """Key of the size of the experts' input and output, in models that project the hidden state to it and back; empty:
    it is the hidden size."""
    joined_too: bool = False
    """Whether checkpoints may also have all experts of a layer as one tensor for gate and up projection together, and
    one for down."""
    dense_layers: str = ""
    """Key of the number of layers at the beginning that have no experts; empty: all have."""
    only_if: str = ""
    """Key that says whether a model of the class has experts at all; empty: all models of the class do."""
    beside: tuple[str, ...] = ()
    """Names of further norms of a layer, of the hidden size, in classes in which every layer with experts has a dense
    MLP beside them and adds both outputs; empty: experts take the place of the MLP."""


@dataclass(frozen=True)
class ModelClass:
    """One model class of SGLang's. In a field that is a flag or a string, True means that each model of the class has
    that part, False that none has, and a string is the key of config.json that says whether a model has the part."""

    models: str
    """Published models of this class, as users know them."""
    verified: tuple[str, ...] = ()
    """Devices, "CPU" or "GPU", on which answers with weights of floats were compared with another implementation's."""
    quantised: tuple[str, ...] = ()
    """Formats of quantised weights with which answers were compared on a GPU."""
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
    """Whether adapters (LoRA) of the class are served. Answers with such adapters were compared with those of merged
    weights."""
    embeds: bool = False
    """Whether SGLang's class makes embeddings of hidden states. An engine of another class would die of a request for
    one."""
    fused: bool = False
    """Whether queries, keys and values are one tensor in checkpoints, and so are gate and up projection."""
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms of a layer, of the hidden size."""
    activation: str = "silu"
    """The one value of `hidden_act` that engines compute for the class."""
    needs: tuple[str, ...] = ()
    """Keys of config.json without which engines fail, other than those that every model's shape is read from."""
    values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values that keys of config.json have to have. With others engines would fail, or compute something else than the
    model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that published configurations leave out, as Transformers has them."""
    rope_by_layer: bool = False
    """Whether rotary embeddings may differ by kind of layer. If so, `max_position_embeddings` is the whole context, and
    factors that stretch positions are in it already."""
    experts: Experts | None = None
    latent: bool = False
    """Whether models of the class have multi-head latent attention (`latent.py`)."""
    windows: bool = False
    """Whether layers with sliding windows are served. Without `window_pool` KV of these layers lies in one pool with
    that of the other layers, so that a window saves compute and no memory."""
    window_pool: bool = False
    """Whether KV of layers with windows has a pool of its own, in which a token that has left its window takes no
    memory. SGLang has such pools for some classes only."""
    two_shapes: bool = False
    """Whether the heads of layers with windows have another shape than those of the other layers (`two_shapes.py`),
    which takes a `window_pool`."""
    layer_scalar: bool = False
    """Whether each layer has a factor for its output."""
    states: str = ""
    """Kind of the layers that keep a state, in models in which only some layers attend; empty: all attend. Gated delta
    nets are "split" (Qwen 3.5) or "by_key_head" (Qwen 3 Next), by how checkpoints arrange their input projections.
    Mamba layers are `MAMBA`."""
    query_gate: bool = False
    """Whether the projection of queries makes a gate for each query head as well, in the rows behind those of the
    head."""
    wrapper: bool = False
    """Whether the class takes images too, so that `text_config` describes its language model. Only text is served, and
    the other parts lie in memory with the weights."""
    tied_beside_text: bool = False
    """Whether the key that says that both embeddings are one tensor counts where it stands beside `text_config`, and
    not within it. Newer versions of Transformers may write another value within it."""
    bare_names: bool = False
    """Whether engines also read checkpoints in which the names of tensors lack "model." in front, as embedding models'
    do."""


_BOTH = ("CPU", "GPU")
_CPU = ("CPU",)
_GATED_DELTA: dict[str, Any] = {
    "qk_norm": True,
    "query_gate": True,
    "needs": ("full_attention_interval", "head_dim", "linear_conv_kernel_dim"),
}
_QWEN_EXPERTS: dict[str, Any] = {
    "count": ("num_experts", "num_local_experts"),
    "size": "moe_intermediate_size",
    "shared_module": "shared_expert",
    "shared_size": "shared_expert_intermediate_size",
    "shared_gate": "shared_expert_gate",
}
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

_DEEPSEEK_EXPERTS: dict[str, Any] = {
    "count": ("n_routed_experts", "num_local_experts"),
    "size": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
}
_DEEPSEEK_NEEDS = ("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace")
_CORRECTION_BIAS = "gate.e_score_correction_bias"
_DEEPSEEK_V3: dict[str, Any] = {
    "latent": True,
    "needs": _DEEPSEEK_NEEDS,
    "values": {
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "norm_topk_prob": (True,),
        "moe_layer_freq": (1,),
    },
    "experts": Experts(**_DEEPSEEK_EXPERTS, router_bias=_CORRECTION_BIAS),
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
        embeds=True,
    ),
    "MistralForCausalLM": ModelClass("Mistral, without a sliding window", _BOTH, adapters=True, embeds=True),
    "Qwen2ForCausalLM": ModelClass("Qwen 2 and 2.5, distilled R1", _BOTH, qkv_bias=True, adapters=True, embeds=True),
    "Qwen3ForCausalLM": ModelClass(
        "Qwen 3",
        _BOTH,
        ("FP8", "FP8 in blocks"),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        adapters=True,
        embeds=True,
        bare_names=True,
    ),
    "Qwen3_5ForCausalLM": ModelClass("Qwen 3.5 and 3.6, text models", _BOTH, states="split", **_GATED_DELTA),
    "Qwen3_5ForConditionalGeneration": ModelClass(
        "Qwen 3.5 and 3.6, text", _BOTH, states="split", wrapper=True, tied_beside_text=True, **_GATED_DELTA
    ),
    "Qwen3_5MoeForCausalLM": ModelClass(
        "Qwen 3.5 and 3.6 mixtures, text models",
        _BOTH,
        states="split",
        experts=Experts(**_QWEN_EXPERTS, joined_too=True),
        **_GATED_DELTA,
    ),
    "Qwen3_5MoeForConditionalGeneration": ModelClass(
        "Qwen 3.5 and 3.6 mixtures: 35B-A3B, text",
        _BOTH,
        states="split",
        wrapper=True,
        tied_beside_text=True,
        experts=Experts(**_QWEN_EXPERTS, joined_too=True),
        **_GATED_DELTA,
    ),
    "Qwen3NextForCausalLM": ModelClass(
        "Qwen 3 Next, Coder Next",
        _BOTH,
        states="by_key_head",
        experts=Experts(**_QWEN_EXPERTS),
        **{**_GATED_DELTA, "needs": (*_GATED_DELTA["needs"], "rope_theta", "partial_rotary_factor")},
    ),
    "NemotronHForCausalLM": ModelClass(
        "Nemotron-H, Nemotron Nano 2, Nemotron 3",
        _BOTH,
        states=MAMBA,
        mlp_bias="mlp_bias",
        defaults={"head_dim": 128},
        experts=Experts(
            ("n_routed_experts", "num_local_experts"),
            "moe_intermediate_size",
            module="mixer",
            gate="",
            router_bias=_CORRECTION_BIAS,
            shared="n_shared_experts",
            shared_size="moe_shared_expert_intermediate_size",
            latent_size="moe_latent_size",
        ),
    ),
    "Phi3ForCausalLM": ModelClass("Phi 3 and 4, without a sliding window", _BOTH, embeds=True, fused=True),
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
    "Gemma4ForConditionalGeneration": ModelClass(
        "Gemma 4 E2B, E4B, 12B, 31B and 26B-A4B, text",
        _BOTH,
        qk_norm=True,
        norms=_GEMMA_NORMS,
        activation=_GELU,
        windows=True,
        window_pool=True,
        two_shapes=True,
        layer_scalar=True,
        rope_by_layer=True,
        wrapper=True,
        needs=("head_dim", "layer_types", "sliding_window"),
        defaults={
            "max_position_embeddings": 131_072,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
        },
        experts=Experts(
            ("num_experts",),
            "moe_intermediate_size",
            module="",
            router="router.proj",
            router_scales=True,
            used="top_k_experts",
            joined_too=True,
            only_if="enable_moe_block",
            beside=("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        ),
    ),
    "Mistral3ForConditionalGeneration": ModelClass("Mistral Small 3.1 and 3.2, Devstral, text", _BOTH, wrapper=True),
    "Qwen3VLForConditionalGeneration": ModelClass(
        "Qwen 3 VL, text", _BOTH, qk_norm=True, embeds=True, wrapper=True, tied_beside_text=True, needs=("head_dim",)
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
            router_bias=_CORRECTION_BIAS,
            shared="n_shared_experts",
            dense_layers="first_k_dense_replace",
        ),
    ),
    "DeepseekV2ForCausalLM": ModelClass(
        "DeepSeek V2, V2 Lite, V2.5, Coder V2",
        _BOTH,
        latent=True,
        needs=_DEEPSEEK_NEEDS,
        values={
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False,),
            "moe_layer_freq": (1,),
        },
        experts=Experts(**_DEEPSEEK_EXPERTS),
    ),
    "DeepseekV3ForCausalLM": ModelClass("DeepSeek V3, V3.1, R1, and models made like them", _BOTH, **_DEEPSEEK_V3),
    "KimiK25ForConditionalGeneration": ModelClass(
        "Kimi K2.5 to K2.7, text",
        _CPU,
        wrapper=True,
        # Engines read the class of the language model too, in `text_config`.
        **{**_DEEPSEEK_V3, "values": {**_DEEPSEEK_V3["values"], "architectures": (["DeepseekV3ForCausalLM"],)}},
    ),
    "Glm4MoeLiteForCausalLM": ModelClass(
        "GLM 4.7 Flash",
        _BOTH,
        latent=True,
        needs=(*_DEEPSEEK_NEEDS, "q_lora_rank"),  # without it engines would leave the projection of queries unset
        values={"norm_topk_prob": (True,)},
        experts=Experts(**_DEEPSEEK_EXPERTS, router_bias=_CORRECTION_BIAS),
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
        window_pool=True,
        needs=("layer_types", "sliding_window"),
        defaults={"head_dim": 64, "attention_bias": True},
        experts=Experts(
            ("num_local_experts",), "intermediate_size", router="router", router_bias="router.bias", joined=True
        ),
    ),
}
"""The classes, by their names in `architectures` of config.json."""


_NONE = "\u2013"


def markdown() -> str:
    """The first table of `docs/guide/models.md`."""
    rows = [
        f"| {known.models} | `{name}` | {_notes(known)} | {', '.join(known.verified) or _NONE} |"
        f" {', '.join(known.quantised) or _NONE} |"
        for name, known in sorted(CLASSES.items(), key=lambda item: (item[1].wrapper, _is_mixture(item[1]), item[0]))
    ]
    return "\n".join(
        ["| models | class | kind | compared on | and on a GPU, quantised to |", "|---|---|---|---|---|", *rows]
    )


def _is_mixture(known: ModelClass) -> bool:
    """Whether every model of the class has experts."""
    return known.experts is not None and not known.experts.only_if


def _notes(known: ModelClass) -> str:
    notes = [
        "mixture of experts" if _is_mixture(known) else "with or without experts" if known.experts else "",
        "latent attention" if known.latent else "",
        "windows in a pool of their own" if known.window_pool else "windows in one pool" if known.windows else "",
        "states" if known.states else "",
        "text in, text out" if known.wrapper else "",
        "on GPUs only" if known.gpu_only else "",
        "adapters" if known.adapters else "",
        "embeddings" if known.embeds else "",
    ]
    return ", ".join(filter(None, notes)) or _NONE
