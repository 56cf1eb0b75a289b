"""Mean pooling for SGLang's encoders, which have none. Imports SGLang: only the engine process may import this."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.pooler import EmbeddingPoolerOutput

from protos import common_pb2

MEAN = "mean"


def is_one(model: common_pb2.ModelSpec) -> bool:
    """Whether the model is an encoder: its tokens attend to those behind them too, so that nothing of a prompt is of
    use to another, or can be computed before the rest of it."""
    return bool(model.embedding.pooling)


def set_pooling(model: torch.nn.Module, spec: common_pb2.ModelSpec) -> None:
    """Has the model pool as its folder says; SGLang's own encoders take the first token's state."""
    if spec.embedding.pooling == MEAN:
        model.pooler = MeanPooler()


class MeanPooler(torch.nn.Module):
    """The mean of the states of each prompt's tokens, brought to length 1."""

    def forward(self, states: torch.Tensor, batch: Any) -> EmbeddingPoolerOutput:
        """`states`: [tokens of all prompts, hidden]; the vectors are [prompts, hidden]."""
        prompts = states.float().split(batch.extend_seq_lens_cpu)
        means = torch.stack([each.mean(dim=0) for each in prompts])
        return EmbeddingPoolerOutput(embeddings=torch.nn.functional.normalize(means, dim=-1))
