"""What a folder says of the embeddings that its model makes, and whose are refused."""

import json

import pytest

from loader.checkpoints.checkpoint import fingerprint, read
from loader.checkpoints.embedding import Embedding
from loader.checkpoints.errors import BrokenCheckpoint
from tests.loader import checkpoint_files
from tests.loader.checkpoint_files import change_config, change_header

FLOAT32 = 4
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LAST = {"word_embedding_dimension": 32, "pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}


def write(folder, modules=MODULES, pooling=LAST, **changes):
    checkpoint_files.write(folder, **changes)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_sentence_transformers_folder_makes_embeddings_unless_the_catalogue_sets_the_task(tmp_path):
    assert read(write(tmp_path / "a"), FLOAT32).embedding == Embedding(32)
    assert read(tmp_path / "a", FLOAT32, task="generate").embedding is None
    plain = checkpoint_files.write(tmp_path / "b")
    assert read(plain, FLOAT32).embedding is None
    assert read(plain, FLOAT32, task="embed").embedding == Embedding(32)


def test_generation_differs_by_the_task_of_the_model(tmp_path):
    write(tmp_path)
    assert fingerprint(tmp_path) == fingerprint(tmp_path, task="embed") != fingerprint(tmp_path, task="generate")


@pytest.mark.parametrize(
    ("said", "made"),
    [
        ({"is_matryoshka": True}, Embedding(32, True)),
        ({"matryoshka_dimensions": [16, 8]}, Embedding(32, True, (8, 16))),
        ({"is_matryoshka": False}, Embedding(32)),
    ],
)
def test_configuration_decides_whether_embeddings_may_be_shortened(tmp_path, said, made):
    assert read(write(tmp_path, **said), FLOAT32).embedding == made


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        (MODULES, {"pooling_mode_mean_tokens": True}, "1_Pooling/config.json: pooling by mean_tokens is not supported"),
        (MODULES, {"pooling_mode": "cls"}, "pooling by cls"),
        (MODULES, {**LAST, "pooling_mode_cls_token": True}, "pooling by cls_token, lasttoken"),
        (MODULES, {}, "pooling by nothing"),
        (MODULES, [], "1_Pooling/config.json is not a JSON object"),
        ([*MODULES, {"type": "sentence_transformers.models.Dense"}], LAST, "module of type Dense is not supported"),
        ({"0": {}}, LAST, "modules.json is not a list"),
        ([{}], LAST, "module of type \\? is not"),
    ],
)
def test_embeddings_of_another_kind_are_refused_by_name(tmp_path, modules, pooling, why):
    with pytest.raises(BrokenCheckpoint, match=why):
        read(write(tmp_path, modules, pooling), FLOAT32)
    assert read(tmp_path, FLOAT32, task="generate").embedding is None


@pytest.mark.parametrize("shorter", ["8", [0], [33], [True]])
def test_impossible_embedding_dimensions_are_refused(tmp_path, shorter):
    checkpoint_files.write(tmp_path, matryoshka_dimensions=shorter)
    with pytest.raises(BrokenCheckpoint, match="matryoshka_dimensions = .* from 1 to 32"):
        read(tmp_path, FLOAT32, task="embed")


def test_tensor_names_without_a_prefix_are_accepted_where_the_engine_accepts_them(tmp_path):
    def bare(header):
        for name in [name for name in header if name.startswith("model.")]:
            header[name.removeprefix("model.")] = header.pop(name)

    for folder, kind in ((tmp_path / "a", "Qwen3ForCausalLM"), (tmp_path / "b", "LlamaForCausalLM")):
        checkpoint_files.write(folder)
        change_config(folder, architectures=[kind], head_dim=8)
        if kind.startswith("Qwen3"):
            change_header(folder, add_norms)
        whole = read(folder, FLOAT32, task="embed")
        change_header(folder, bare)
        if kind.startswith("Qwen3"):
            assert read(folder, FLOAT32, task="embed").weights_bytes == whole.weights_bytes
        else:
            with pytest.raises(BrokenCheckpoint, match=r"lack model\.embed_tokens"):
                read(folder, FLOAT32, task="embed")


def add_norms(header):
    end = max(one["data_offsets"][1] for one in header.values())
    for layer in range(2):
        for which in "qk":
            name = f"model.layers.{layer}.self_attn.{which}_norm.weight"
            header[name] = {"dtype": "BF16", "shape": [8], "data_offsets": [end, end + 16]}
            end += 16
