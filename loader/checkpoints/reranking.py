"""The reranker that a folder's model is, if it is one, by the files that sentence-transformers puts beside a checkpoint
and by the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loader.checkpoints.config_values import TOKEN, check
from loader.checkpoints.embedding import MODULES, kind_of
from loader.checkpoints.errors import BrokenCheckpoint
from loader.checkpoints.weight_files import read_json

TASK = "rerank"
_SCORE = "LogitScore"
_UNDERSTOOD = ("Transformer", _SCORE)


@dataclass(frozen=True)
class Reranker:
    """The two tokens with which a model answers whether a document answers a query: their probabilities behind the
    prompt are its score. None: the tokens of "yes" and "no"."""

    yes_token_id: int | None = None
    no_token_id: int | None = None


def reranks(folder: Path, task: str) -> bool:
    """Whether the folder's model is a reranker. `task` is the catalogue's setting; if it is empty, a model is one that
    sentence-transformers scores by tokens' logits."""
    return task == TASK or (not task and _score_module(folder) is not None)


def read(folder: Path) -> Reranker:
    """The reranker of a folder whose model is one. Raises BrokenCheckpoint."""
    module = _score_module(folder)
    if module is None:
        return Reranker()
    for other in read_json(folder / MODULES):
        if kind_of(other) not in _UNDERSTOOD:
            raise BrokenCheckpoint(f"{MODULES}: a module of type {kind_of(other)} of a reranker is not supported")
    path = str(module.get("path", ""))
    name = f"{path}/config.json"
    config = read_json(folder / path / "config.json")
    if not isinstance(config, dict):
        raise BrokenCheckpoint(f"{name} is not a JSON object")
    if config.get("false_token_id") is None:
        raise BrokenCheckpoint(f"{name} has no false_token_id: scores by the logit of one token are not supported")
    for key in ("true_token_id", "false_token_id"):
        check(name, key, config.get(key), TOKEN)
    return Reranker(config["true_token_id"], config["false_token_id"])


def _score_module(folder: Path) -> dict[str, Any] | None:
    """The module that scores by tokens' logits; None if there is none."""
    if not (folder / MODULES).is_file():
        return None
    modules = read_json(folder / MODULES)
    if not isinstance(modules, list):
        return None
    return next((one for one in modules if isinstance(one, dict) and kind_of(one) == _SCORE), None)
