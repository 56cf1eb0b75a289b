"""What a folder says of a model that ranks documents, and whose are refused."""

import json

import pytest

from loader.checkpoints.checkpoint import fingerprint, read
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.reranking import Reranker
from tests.loader import checkpoint_files

FLOAT32 = 4
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"},
    {
        "idx": 1,
        "name": "1",
        "path": "1_LogitScore",
        "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
    },
]
TOKENS = {"true_token_id": 7, "false_token_id": 5}


def write(folder, modules=MODULES, tokens=TOKENS):
    checkpoint_files.write(folder)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    return folder


def test_sentence_transformers_reranker_is_one_unless_the_catalogue_sets_the_task(tmp_path):
    found = read(write(tmp_path / "a"), FLOAT32)
    assert (found.reranker, found.embedding) == (Reranker(7, 5), None)
    assert read(tmp_path / "a", FLOAT32, task="generate").reranker is None
    plain = checkpoint_files.write(tmp_path / "b")
    assert read(plain, FLOAT32).reranker is None
    assert read(plain, FLOAT32, task="rerank").reranker == Reranker()
    assert fingerprint(plain) != fingerprint(plain, task="rerank")


@pytest.mark.parametrize(
    ("modules", "tokens", "why"),
    [
        (MODULES, {"true_token_id": 7, "false_token_id": None}, "1_LogitScore/config.json has no false_token_id"),
        (MODULES, {**TOKENS, "true_token_id": "yes"}, "1_LogitScore/config.json: true_token_id"),
        (MODULES, [], "1_LogitScore/config.json is not a JSON object"),
        ([*MODULES, {"type": "x.Dense"}], TOKENS, "a module of type Dense"),
    ],
)
def test_reranker_that_cannot_be_served_is_refused_with_the_file(tmp_path, modules, tokens, why):
    with pytest.raises(BrokenCheckpoint, match=why):
        read(write(tmp_path, modules, tokens), FLOAT32)
