"""Weights that a seed makes, for benchmarks. Knows torch only: whoever compares this engine with another program draws
the same there."""

from __future__ import annotations

import zlib

import torch


def draw(model: torch.nn.Module) -> None:
    """Sets all parameters: the same in every process on the same kind of device, by their names. Activations keep their
    scale and attention is peaked, so that greedy tokens depend on weights and on KV."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
        if parameter.ndim < 2:
            parameter.data.fill_(1.0)
            continue
        scale = 1.0 if "embed" in name else parameter.shape[-1] ** -0.5 * (1.7 if "qkv" in name else 1.0)
        parameter.data.normal_(0.0, scale, generator=generator)
