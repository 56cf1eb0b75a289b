"""Which models are served, which are refused by name, and which tensors a whole one has."""

import json

import pytest

from loader.checkpoints.architectures import families
from loader.checkpoints.checkpoint import read
from loader.checkpoints.errors import BrokenCheckpoint
from tests.loader import checkpoint_files
from tests.loader.checkpoint_files import LLAMA, tensors


def config(**changes):
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"architectures": ["BailingMoeV3ForCausalLM"], "kv_lora_rank": 512}, "(MLA)", id="MLA"),
        pytest.param(
            {"architectures": ["DeepseekV32ForCausalLM"], "kv_lora_rank": 512, "index_topk": 2048},
            "(DSA)",
            id="sparse attention",
        ),
        pytest.param(
            {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "index_n_heads": 64},
            "(DSA)",
            id="sparse attention under the name of a class that is served",
        ),
        pytest.param(
            {"architectures": ["KimiVLForConditionalGeneration"], "text_config": {"kv_lora_rank": 512}},
            "KimiVLForConditionalGeneration is multimodal",
            id="latent attention of a multimodal model",
        ),
        pytest.param(
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16},
            "sliding-window attention",
            id="sliding window of Mistral",
        ),
        pytest.param(
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 64,
                "rope_scaling": {"type": "yarn", "factor": 2.0},
            },
            "sliding-window attention",
            id="a window as long as a context that is stretched",
        ),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 16, "use_sliding_window": True},
            "sliding-window attention",
            id="sliding window that Qwen2 uses",
        ),
        pytest.param(
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "sliding-window attention",
            id="sliding window by layer",
        ),
        pytest.param(
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
            "hybrid",
            id="hybrid by layer",
        ),
        pytest.param({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16}, "hybrid", id="state space"),
        pytest.param({"architectures": ["LlavaForConditionalGeneration"]}, "multimodal", id="multimodal by name"),
        pytest.param({"vision_config": {}}, "multimodal", id="multimodal by its parts"),
        pytest.param(
            {"architectures": ["OlmoForCausalLM"]},
            "OlmoForCausalLM is not supported; these are: DeepseekV2",
            id="unknown",
        ),
        pytest.param({"architectures": None}, "names no architecture", id="none named"),
        pytest.param({"model_type": None}, "no model_type", id="no type"),
        pytest.param({"architectures": "Llama"}, "names no architecture", id="none that is a list"),
    ],
)
def test_unsupported_configuration_is_refused_by_name(changes, reason):
    assert reason in (families.refusal(config(**changes)) or "")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="llama"),
        pytest.param({"architectures": ["MistralForCausalLM"], "sliding_window": None}, id="mistral without a window"),
        pytest.param(
            {"architectures": ["MistralForCausalLM"], "sliding_window": 64}, id="a window as long as the context"
        ),
        pytest.param(
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 16},
            id="a window that Qwen2 does not use",
        ),
        pytest.param({"layer_types": ["full_attention"] * 2}, id="full attention by layer"),
    ],
)
def test_full_attention_is_served(changes):
    assert families.refusal(config(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"num_hidden_layers": None}, "has no num_hidden_layers", id="missing"),
        pytest.param({"hidden_size": "32"}, "hidden_size = '32' is not a positive whole number", id="text"),
        pytest.param({"vocab_size": 0}, "vocab_size = 0 is not", id="zero"),
        pytest.param({"num_attention_heads": True}, "num_attention_heads = True", id="a truth value"),
        pytest.param({"num_key_value_heads": 3}, "4 attention heads cannot share 3", id="heads that do not share"),
        pytest.param({"hidden_size": 33}, "33 does not divide into 4 heads", id="no head size"),
        pytest.param({"rope_scaling": {"type": "linear", "factor": "two"}}, "factor = 'two'", id="stretch"),
        pytest.param(
            {"max_position_embeddings": 1 << 40}, "max_position_embeddings is larger than 2147483647", id="endless"
        ),
        pytest.param({"num_hidden_layers": 10**18}, "num_hidden_layers is larger", id="endless layers"),
        pytest.param({"layer_types": ["full_attention"]}, "layer_types has 1 of", id="kinds of too few layers"),
        pytest.param(
            {"rope_scaling": {"type": "linear", "factor": 1e308}}, "positions 1e+308 times", id="endless stretch"
        ),
        pytest.param({"num_hidden_layers": 5000}, "num_hidden_layers is 5000, more than 4096", id="too many layers"),
    ],
)
def test_impossible_configuration_is_refused_with_its_key(changes, reason):
    with pytest.raises(BrokenCheckpoint) as broken:
        families.read_shape(config(**changes))
    assert reason in str(broken.value)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("hidden_act", "nope", "silu"),
        ("hidden_act", "gelu", "silu"),
        ("rope_theta", "x", "a number above 0"),
        ("rope_theta", 0, "a number above 0"),
        ("rope_theta", [10000.0], "a number above 0"),
        ("rope_theta", float("inf"), "a number above 0"),
        ("rms_norm_eps", "1e-5", "a number of 0 or more"),
        ("rms_norm_eps", -1.0, "a number of 0 or more"),
        ("partial_rotary_factor", 7, "a number above 0, at most 1"),
        ("torch_dtype", "double", "float16, half, bfloat16, float32 or float"),
        ("torch_dtype", "float7", "float16, half, bfloat16, float32 or float"),
        ("dtype", "torch.bfloat16", "float16, half, bfloat16, float32 or float"),
        ("dtype", {"text": "bfloat16"}, "float16, half, bfloat16, float32 or float"),
        ("tie_word_embeddings", "false", "true or false"),
        ("attention_bias", 1, "true or false"),
        ("mlp_bias", [], "true or false"),
        ("rope_is_neox_style", "yes", "true or false"),
        ("layer_types", "full_attention", "a list of names"),
        ("sliding_window", "x", "a whole number of 0 or more"),
        ("use_sliding_window", "no", "true or false"),
        ("eos_token_id", "</s>", "the number of a token, or a list of such numbers"),
        ("eos_token_id", [2, "x"], "the number of a token, or a list of such numbers"),
        ("bos_token_id", True, "the number of a token"),
        ("num_hidden_layers", 2.0, "a positive whole number"),
    ],
)
def test_a_value_that_no_engine_takes_is_refused_with_its_key_and_what_is_allowed(tmp_path, key, value, allowed):
    checkpoint_files.change_config(checkpoint_files.write(tmp_path), **{key: value})
    with pytest.raises(BrokenCheckpoint) as broken:
        read(tmp_path, dtype_bytes=4)
    assert str(broken.value) == f"config.json: {key} = {value!r} is not {allowed}"
    assert not broken.value.may_pass


def test_number_that_no_float_holds_is_refused_with_its_key(tmp_path):
    checkpoint_files.change_config(checkpoint_files.write(tmp_path), rms_norm_eps=10**400)
    with pytest.raises(BrokenCheckpoint, match="rms_norm_eps = 1000.* is not a number of 0 or more"):
        read(tmp_path, dtype_bytes=4)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000, "torch_dtype": "bfloat16"},
        {"dtype": "half", "torch_dtype": None, "eos_token_id": [1, 2], "bos_token_id": 1, "pad_token_id": -1},
        {"dtype": "float32", "eos_token_id": 2, "sliding_window": None, "partial_rotary_factor": 0.5},
        {
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
            "layer_types": ["full_attention"] * 2,
        },
    ],
)
def test_values_of_published_models_are_accepted(tmp_path, changes):
    checkpoint_files.change_config(checkpoint_files.write(tmp_path), **changes)
    assert read(tmp_path, dtype_bytes=4).layers == 2


def test_refused_value_is_shown_as_far_as_it_fits_a_line(tmp_path):
    checkpoint_files.change_config(checkpoint_files.write(tmp_path), hidden_act="x" * 10_000)
    with pytest.raises(BrokenCheckpoint, match="hidden_act = 'xx") as broken:
        read(tmp_path, dtype_bytes=4)
    assert len(str(broken.value)) < 200


def test_an_architecture_that_is_not_supported_is_named_before_its_values():
    assert "GemmaForCausalLM is not supported" in (
        families.refusal(config(architectures=["GemmaForCausalLM"], hidden_act="gelu_pytorch_tanh")) or ""
    )


def test_key_value_heads_and_head_size_default_to_the_attention_heads():
    shape = families.read_shape(config(num_key_value_heads=None, head_dim=None))
    assert (shape.kv_heads, shape.head_dim) == (4, 8)


def test_the_expected_tensors_are_those_of_a_checkpoint():
    for tied in (True, False):
        it = config(tie_word_embeddings=tied)
        expected = families.expected_tensors(families.read_shape(it), it)
        assert expected == {name: shape for name, (_, shape) in tensors(it).items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_checkpoint_saved_by_transformers_is_whole_and_as_large_as_its_parameters(tmp_path, kind, changes):
    transformers = pytest.importorskip("transformers")
    shape = {key: LLAMA[key] for key in LLAMA if key not in ("architectures", "model_type")} | {"vocab_size": 128}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape, **changes))
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    found = read(tmp_path, dtype_bytes=4)
    parameters = {one.data_ptr(): 4 * one.numel() for one in model.parameters()}
    aligned = sum(-(-nbytes // 256) * 256 for nbytes in parameters.values())
    assert found.weights_bytes == aligned
