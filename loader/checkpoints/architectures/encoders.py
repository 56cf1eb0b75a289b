"""Encoders of the shapes of BERT and XLM-RoBERTa, which make embeddings, and cross-encoders of XLM-RoBERTa's shape
(bge-reranker), which make one number of a query and a document.

A token of an encoder attends to the tokens behind it too, so keys and values belong to one whole prompt, and no prefix
is of use to another. SGLang keeps them in the KV pool during the step that computes the prompt. The KV of a token has
the size that it has in a decoder of the same shape, and the floor is likewise one prompt of the whole context.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loader.checkpoints.architectures.families import ModelShape, checked_layers
from loader.checkpoints.config_values import CONFIG, TOKEN, check, number
from loader.checkpoints.errors import BrokenCheckpoint
from services.wording.json_values import COUNT, at_least, one_of

BERT, ROBERTA = "BertModel", "XLMRobertaModel"
SERVED = (BERT, ROBERTA)
"""Classes of encoders that make embeddings."""
RANKS = "XLMRobertaForSequenceClassification"
"""Class of encoders that rank documents."""
_KNOWN = ("Bert", "Roberta", "XLMRoberta", "DistilBert", "ModernBert", "MPNet", "Contriever", "NomicBert", "Electra")
"""Beginnings of the names of encoders' classes."""
_LABELS = ("ForSequenceClassification", "ForRewardModel", "ForClassification")
"""Ends of the names of classes that give a text labels or a reward."""
_ACTIVATION, _IDENTITY = "sbert_ce_default_activation_function", "Identity"
_VALUES = {
    "hidden_act": one_of("gelu"),
    "position_embedding_type": one_of("absolute"),
    "layer_norm_eps": at_least(0),
}
"""Values that SGLang's classes compute, by keys of config.json that the classes read."""


def is_one(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of an encoder that is served."""
    names = config.get("architectures")
    return isinstance(names, list) and len(names) == 1 and names[0] in (*SERVED, RANKS)


def ranks(name: str) -> bool:
    """Whether the encoder of this class ranks documents instead of making embeddings."""
    return name == RANKS


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why an encoder, or a model that gives labels or rewards, is not served, though SGLang may have its class. None if
    it is served, or if the model is neither."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if is_one(config):
        if config.get("is_decoder") or config.get("is_encoder_decoder"):
            return f"{name} with a decoder is not supported"
        if config.get("quantization_config"):
            return f"{name} with quantised weights is not supported"
        if not isinstance(config.get("model_type"), str):
            return "config.json has no model_type, by which engines know it"
        labels = config.get("id2label")
        if name == RANKS and (not isinstance(labels, dict) or len(labels) != 1):
            return f"{name} without exactly one label (id2label) is not supported: rerankers have one"
        if str(config.get(_ACTIVATION) or _IDENTITY).rpartition(".")[2] != _IDENTITY:
            return f"{name} with {_ACTIVATION} = {config[_ACTIVATION]!r} is not supported: {_IDENTITY} is"
        return None
    if name.endswith(_LABELS):
        return (
            f"{name} gives a text labels or a reward, which is not supported: of rerankers those are that make text,"
            " and answer by the probabilities of two tokens"
        )
    if name.startswith(_KNOWN):
        return f"{name} is an encoder, which is not supported: of encoders {' and '.join(SERVED)} are, for embeddings"
    return None


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of an encoder. Raises BrokenCheckpoint naming the key that is missing or impossible."""
    for key, kind in _VALUES.items():
        if config.get(key) is None:
            if key != "position_embedding_type":
                raise BrokenCheckpoint(f"{CONFIG} has no {key}")
        else:
            check(CONFIG, key, config[key], kind)
    heads, hidden = number(config, "num_attention_heads"), number(config, "hidden_size")
    if hidden % heads:
        raise BrokenCheckpoint(f"{CONFIG}: hidden_size {hidden} does not divide into {heads} heads")
    name = config["architectures"][0]
    context = number(config, "max_position_embeddings")
    if name != BERT:  # the first position is the one behind the padding token's id
        pad = config.get("pad_token_id")
        check(CONFIG, "pad_token_id", pad, TOKEN)
        context -= int(pad or 0) + 1
        if context < 1:
            raise BrokenCheckpoint(f"{CONFIG}: pad_token_id leaves none of max_position_embeddings")
    return ModelShape(
        architecture=name,
        layers=checked_layers(number(config, "num_hidden_layers")),
        hidden=hidden,
        intermediate=number(config, "intermediate_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocabulary=number(config, "vocab_size"),
        context_tokens=context,
        tied=True,
    )


def expected_tensors(shape: ModelShape, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a whole checkpoint of this shape has, by name, without the pooler, which no embedding
    needs. Raises BrokenCheckpoint."""
    kinds = config.get("type_vocab_size")
    check(CONFIG, "type_vocab_size", kinds, COUNT)
    hidden, wide = shape.hidden, shape.intermediate
    rows = {"word": shape.vocabulary, "position": config["max_position_embeddings"], "token_type": int(kinds or 0)}
    tensors: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (count, hidden) for name, count in rows.items()
    }
    tensors |= _norm("embeddings.LayerNorm", hidden)
    for layer in range(shape.layers):
        at = f"encoder.layer.{layer}."
        for name, outputs, inputs in (
            *((f"attention.self.{part}", hidden, hidden) for part in ("query", "key", "value")),
            ("attention.output.dense", hidden, hidden),
            ("intermediate.dense", wide, hidden),
            ("output.dense", hidden, wide),
        ):
            tensors |= {f"{at}{name}.weight": (outputs, inputs), f"{at}{name}.bias": (outputs,)}
        tensors |= _norm(f"{at}attention.output.LayerNorm", hidden) | _norm(f"{at}output.LayerNorm", hidden)
    if shape.architecture != RANKS:
        return tensors
    head = {"dense": hidden, "out_proj": 1}
    return (
        {f"roberta.{name}": size for name, size in tensors.items()}
        | {f"classifier.{name}.weight": (rows, hidden) for name, rows in head.items()}
        | {f"classifier.{name}.bias": (rows,) for name, rows in head.items()}
    )


def _norm(name: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
