import json

import gguf
import jinja2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from deploy.local.smollm2 import folder, hf_folder
from loader.checkpoints import checkpoint as loaders


@pytest.fixture(scope="module")
def reader():
    return gguf.GGUFReader(folder.weights_file())


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


@given(heads=st.integers(1, 4), half=st.integers(1, 4), width=st.integers(1, 3))
def test_rotary_rows_rotated_together_are_half_a_head_apart(heads, half, width):
    together = np.arange(heads * half).repeat(2)  # llama.cpp's order: beside each other
    rows = hf_folder.rotary_in_halves(np.stack([together] * width, axis=1), heads)
    assert rows.shape == (heads * half * 2, width)
    for head in rows[:, 0].reshape(heads, 2, half):
        assert (head[0] == head[1]).all() and (np.diff(head[0]) == 1).all()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_tensor_names_are_those_of_transformers(name, wanted):
    assert hf_folder.tensor_name(name) == wanted


def test_smollm2_configuration_is_the_published_one(smollm2):
    config = AutoConfig.from_pretrained(smollm2)
    assert (config.model_type, config.architectures, config.dtype) == ("llama", ["LlamaForCausalLM"], torch.bfloat16)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49152, 8192, True)
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"]) == (1e-5, 100000)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    made = GenerationConfig.from_pretrained(smollm2)
    assert (made.bos_token_id, made.eos_token_id, made.pad_token_id) == (1, 2, 2)


def test_smollm2_folder_is_read_by_the_loader(smollm2):
    found = loaders.read(smollm2, 2)
    assert (found.context_tokens, found.vocabulary, found.kv_bytes_per_token) == (8192, 49152, 30 * 2 * 3 * 64 * 2)
    assert found.weights_bytes == pytest.approx(134_515_008 * 2, rel=0.001)


def test_smollm2_weights_are_those_of_the_package_but_for_rounding(smollm2, reader):
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(smollm2 / "model.safetensors", "pt") as weights:
        assert len(list(weights.keys())) == len(tensors) == 2 + 9 * 30
        for name in ("token_embd.weight", "blk.7.ffn_down.weight", "blk.7.attn_k.weight", "output_norm.weight"):
            there = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
            here = weights.get_tensor(hf_folder.tensor_name(name)).float().numpy()
            if name == "blk.7.attn_k.weight":  # the second row of a head there is the first of its second half here
                assert here[64 + 32] == pytest.approx(there[64 + 1], rel=2**-8)
                continue
            assert here.shape == there.shape
            np.testing.assert_allclose(here, there, rtol=2**-8)


def test_special_tokens_of_smollm2_are_one_token_each_with_the_published_ids(tokenizer):
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>") == [1, 4093, 198, 2]
    assert sorted(tokenizer.added_tokens_decoder) == list(range(17)) and len(tokenizer) == 49152


TEXTS = [
    "Hello, world!",
    "a  12",
    "x = 12\n  34",
    "it's   2024 now",
    "½ ² x1y2",
    "naïve Ωμέγα 日本語 🙂",
    "\t\n\n  end ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_gives_the_ids_of_tokenizer_json_and_decodes_to_the_text(smollm2, tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids) == text


def test_digits_are_one_token_each(tokenizer):
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  123").input_ids) == ["a", "ĠĠ", "1", "2", "3"]


def user(text):
    return {"role": "user", "content": text}


SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [user("Hi"), {"role": "assistant", "content": "Hello!"}, user("What is  2+2?\n")]


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", [[user("Hi")], [SYSTEM, user("Hi")], TURNS, [SYSTEM, *TURNS], [*TURNS, SYSTEM]])
def test_chat_template_without_tools_writes_what_that_of_the_package_does(tokenizer, reader, messages, prompt):
    own = reader.fields["tokenizer.chat_template"].contents()
    options = {"tokenize": False, "add_generation_prompt": prompt}
    wanted = tokenizer.apply_chat_template(messages, chat_template=own, **options)
    assert tokenizer.apply_chat_template(messages, **options) == wanted


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def calls(*arguments):
    return [{"id": "1", "type": "function", "function": {"name": "add", "arguments": each}} for each in arguments]


def test_chat_template_with_tools_writes_tools_calls_and_results_as_hermes_does(tokenizer):
    messages = [
        SYSTEM,
        user("1+2? 3+4?"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls({"a": 1, "b": 2}, {"a": 3, "b": 4})},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "7"},
    ]
    written = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    system, *turns = written.split("<|im_start|>")[1:]
    assert system.startswith("system\nBe brief.\n\n") and system.endswith("</tool_call><|im_end|>\n")
    shown = system.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in shown.splitlines()] == [TOOL]
    assert turns == [
        "user\n1+2? 3+4?<|im_end|>\n",
        'assistant\nLet me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 4}}\n</tool_call><|im_end|>\n',
        "tool\n<tool_response>\n3\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n",
        "assistant\n",
    ]


def test_chat_template_writes_a_call_without_text_as_only_the_call(tokenizer):
    messages = [user("1+2?"), {"role": "assistant", "content": None, "tool_calls": calls({"a": 1})}]
    written = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    assert written.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    )


def test_chat_template_refuses_an_unknown_role_by_name(tokenizer):
    with pytest.raises(jinja2.TemplateError, match="there is no role 'developer'"):
        tokenizer.apply_chat_template([{"role": "developer", "content": "Be brief."}, user("Hi")], tokenize=False)
