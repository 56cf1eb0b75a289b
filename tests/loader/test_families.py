"""Which models are served, which are refused by name, and which tensors a whole one has."""

import json

import pytest

from loader import families
from loader.checkpoint import read
from loader.errors import BrokenCheckpoint
from tests.loader.checkpoints import LLAMA, tensors


def config(**changes):
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "(MLA)", id="MLA"),
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
            {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"]},
            "sliding-window attention",
            id="sliding window by layer",
        ),
        pytest.param(
            {"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
            "hybrid",
            id="hybrid by layer",
        ),
        pytest.param({"architectures": ["JambaForCausalLM"], "mamba_d_state": 16}, "hybrid", id="state space"),
        pytest.param({"architectures": ["LlavaForConditionalGeneration"]}, "multimodal", id="multimodal by name"),
        pytest.param({"vision_config": {}}, "multimodal", id="multimodal by its parts"),
        pytest.param({"quantization_config": {"quant_method": "awq"}}, "quantised (awq)", id="quantised"),
        pytest.param(
            {"architectures": ["MixtralForCausalLM"]},
            "MixtralForCausalLM is not supported; these are: Llama",
            id="unknown",
        ),
        pytest.param({"architectures": None}, "names no architecture", id="none named"),
        pytest.param({"architectures": "Llama"}, "names no architecture", id="none that is a list"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes, reason):
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
        pytest.param({"max_position_embeddings": 1 << 40}, "a context of 1099511627776 tokens", id="endless"),
    ],
)
def test_an_impossible_configuration_is_refused_with_its_key(changes, reason):
    with pytest.raises(BrokenCheckpoint) as broken:
        families.read_shape(config(**changes))
    assert reason in str(broken.value)


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
def test_what_transformers_saves_is_whole_and_as_large_as_its_parameters(tmp_path, kind, changes):
    transformers = pytest.importorskip("transformers")
    shape = {key: LLAMA[key] for key in LLAMA if key not in ("architectures", "model_type")} | {"vocab_size": 128}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape, **changes))
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    found = read(tmp_path, dtype_bytes=4)
    parameters = {one.data_ptr(): 4 * one.numel() for one in model.parameters()}
    aligned = sum(-(-nbytes // 256) * 256 for nbytes in parameters.values())
    assert found.weights_bytes == aligned
