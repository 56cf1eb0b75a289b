"""Encoders that make embeddings: what their folders need, and which are refused."""

import json

import pytest

from loader.checkpoints.checkpoint import read
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.reranking import Reranker
from tests.loader import checkpoint_files
from tests.loader.checkpoint_files import change_config

FLOAT32, FLOAT16 = 4, 2
CONFIG = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "type_vocab_size": 2,
    "vocab_size": 100,
}
MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
]


def tensors(hidden=32, wide=64, layers=2):
    found = {
        "embeddings.word_embeddings.weight": [100, hidden],
        "embeddings.position_embeddings.weight": [128, hidden],
        "embeddings.token_type_embeddings.weight": [2, hidden],
        "pooler.dense.weight": [hidden, hidden],
    }
    norms = ["embeddings.LayerNorm"]
    for layer in range(layers):
        at = f"encoder.layer.{layer}."
        shapes = {f"attention.self.{part}": [hidden, hidden] for part in ("query", "key", "value")}
        shapes |= {"attention.output.dense": [hidden, hidden], "intermediate.dense": [wide, hidden]}
        for name, shape in (shapes | {"output.dense": [hidden, wide]}).items():
            found |= {f"{at}{name}.weight": shape, f"{at}{name}.bias": shape[:1]}
        norms += [f"{at}attention.output.LayerNorm", f"{at}output.LayerNorm"]
    return found | {f"{norm}.{part}": [hidden] for norm in norms for part in ("weight", "bias")}


def write(folder, pooling="mean_tokens", modules=MODULES, without="", **changes):
    checkpoint_files.write(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    there = {name: ("F32", tuple(shape)) for name, shape in tensors().items() if name != without}
    checkpoint_files.write_safetensors(folder / checkpoint_files.SINGLE, checkpoint_files.described(there))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return folder


@pytest.mark.parametrize(("said", "pooling"), [("mean_tokens", "mean"), ("cls_token", "cls")])
def test_encoder_makes_embeddings_by_its_folders_pooling(tmp_path, said, pooling):
    found = read(write(tmp_path, said), FLOAT32)
    assert (found.architecture, found.context_tokens, found.vocabulary) == ("BertModel", 128, 100)
    assert (found.embedding.dimensions, found.embedding.pooling) == (32, pooling)
    assert found.kv_bytes_per_token == 2 * 2 * 32 * 4 and found.verified


def test_context_of_xlm_roberta_begins_behind_the_padding_token(tmp_path):
    found = read(write(tmp_path, architectures=["XLMRobertaModel"], model_type="xlm-roberta", pad_token_id=1), FLOAT32)
    assert (found.architecture, found.context_tokens) == ("XLMRobertaModel", 126)


def test_cross_encoder_of_one_label_ranks_documents(tmp_path):
    ranks = {"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta", "pad_token_id": 1}
    write(tmp_path, modules=None, **ranks, id2label={"0": "LABEL_0"})
    there = {f"roberta.{name}": ("F32", tuple(shape)) for name, shape in tensors().items()}
    head = {"dense.weight": (32, 32), "dense.bias": (32,), "out_proj.weight": (1, 32), "out_proj.bias": (1,)}
    there |= {f"classifier.{name}": ("F32", shape) for name, shape in head.items()}
    checkpoint_files.write_safetensors(tmp_path / checkpoint_files.SINGLE, checkpoint_files.described(there))
    for task in ("", "rerank"):
        found = read(tmp_path, FLOAT32, task=task)
        assert (found.embedding.dimensions, found.embedding.pooling, found.reranker) == (1, "pair", Reranker())
    with pytest.raises(BrokenCheckpoint, match="ranks documents"):
        read(tmp_path, FLOAT32, task="embed")
    for change, why in (
        ({"id2label": {"0": "a", "1": "b"}}, "exactly one label"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "Sigmoid"),
    ):
        with pytest.raises(BrokenCheckpoint, match=why):
            write(tmp_path, modules=None, **ranks, **({"id2label": {"0": "LABEL_0"}} | change))
            read(tmp_path, FLOAT32)


@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32])
def test_encoder_is_verified_on_cpus_and_gpus(tmp_path, dtype):
    assert read(write(tmp_path), dtype).verified


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"without": "encoder.layer.1.output.dense.bias"}, "the weights lack encoder.layer.1.output.dense.bias"),
        ({"intermediate_size": 65}, r"intermediate.dense.weight is \[64, 32\]"),
        ({"hidden_act": "gelu_new"}, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"num_attention_heads": 5}, "does not divide into 5 heads"),
        ({"type_vocab_size": None}, "type_vocab_size"),
        ({"is_decoder": True}, "with a decoder"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"pooling": "max_tokens"}, "pooling by max_tokens is not supported, only mean_tokens or cls_token"),
        ({"modules": None}, "how an encoder's states become one"),
        ({"modules": MODULES[:1]}, "how an encoder's states become one"),
        ({"architectures": ["RobertaModel"]}, "RobertaModel is an encoder, which is not supported"),
        ({"architectures": ["XLMRobertaModel"], "pad_token_id": 127}, "pad_token_id leaves none"),
        ({"architectures": ["XLMRobertaModel"], "pad_token_id": "<pad>"}, "pad_token_id"),
        ({"architectures": ["BertForSequenceClassification"]}, "gives a text labels or a reward"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "gives a text labels or a reward"),
    ],
)
def test_encoder_that_cannot_be_served_is_refused_by_name(tmp_path, changes, why):
    with pytest.raises(BrokenCheckpoint, match=why):
        read(write(tmp_path, **changes), FLOAT32)
    if "architectures" in changes:
        with pytest.raises(BrokenCheckpoint, match=why):
            read(tmp_path, FLOAT32, unverified=True)


def test_encoder_on_several_devices_or_for_text_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(BrokenCheckpoint, match="by one device"):
        read(tmp_path, FLOAT32, devices=2)
    for task in ("generate", "rerank"):
        with pytest.raises(BrokenCheckpoint, match=f"task = '{task}'"):
            read(tmp_path, FLOAT32, task=task)
    change_config(tmp_path, hidden_size="32")
    with pytest.raises(BrokenCheckpoint, match="hidden_size"):
        read(tmp_path, FLOAT32)


@pytest.mark.parametrize(
    ("layers", "why"), [(1 << 20, "num_hidden_layers is 1048576, more"), (1 << 40, "is larger than 2147483647")]
)
def test_encoder_of_more_layers_than_any_has_is_refused_before_its_tensors_are_counted(tmp_path, layers, why):
    write(tmp_path)
    change_config(tmp_path, num_hidden_layers=layers)
    with pytest.raises(BrokenCheckpoint, match=why):
        read(tmp_path, FLOAT32)
