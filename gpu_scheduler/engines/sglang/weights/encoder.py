"""What SGLang's encoders lack: pooling by the mean, and a table that they read and never use. Imports SGLang: only the
engine process may import this."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.pooler import EmbeddingPoolerOutput

from protos import common_pb2

_UNUSED = "position_ids"
"""Parameter of SGLang's encoders that newer checkpoints do not have."""
MEAN = "mean"


def is_one(model: common_pb2.ModelSpec) -> bool:
    """Whether the model is an encoder: its tokens attend to those behind them too, so that nothing of a prompt is of
    use to another, or can be computed before the rest of it."""
    return bool(model.embedding.pooling)


def fill_unused(model: torch.nn.Module) -> None:
    """Sets the tables that no encoder uses, which a checkpoint may lack."""
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] == _UNUSED:
            parameter.data.zero_()


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
