"""What both fronts of the reference load, and SGLang's arguments for it. Imports SGLang: for the reference's own
processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader

from benchmarks.gpu.shapes import STATES_OF_A_REQUEST
from gpu_scheduler.engines.sglang.base.options import Options, arguments, kind_of
from gpu_scheduler.engines.sglang.weights.random_weights import checkpoint
from protos import engine_pb2


class RandomLoader(DefaultModelLoader):
    """The weights that our engine draws with `random_weights`. Given to SGLang as `load_format`."""

    def __init__(self, load_config: LoadConfig) -> None:
        load_config.load_format = LoadFormat.AUTO
        super().__init__(load_config)

    def _get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return checkpoint(model_config.model_path, model_config.dtype, next(model.parameters()).device)


def sglang_arguments(load: engine_pb2.Load) -> dict[str, Any]:
    """SGLang's arguments for the model of a Load, by name: those that our engine would give it, with a pool of
    `pool_tokens` tokens. Where requests have states, they are kept as SGLang chooses: on a GPU it caches some within
    prompts and answers, which takes five states a request and lets steps overlap."""
    given = dict(load.options)
    pool_tokens = int(given.pop("pool_tokens"))
    given.pop("most_bytes", None)
    options = Options.parse(given, load.device)
    named = arguments(load.model, load.device, options, RandomLoader, 1 + len(load.others))
    named |= {"max_total_tokens": pool_tokens, "load_format": RandomLoader if options.random_weights else "auto"}
    states = "mamba_radix_cache_strategy" in named
    if states:
        named["max_mamba_cache_size"] = STATES_OF_A_REQUEST * options.max_running_requests
    if kind_of(load.device) == "cuda":
        del named["sampling_backend"]  # its own choice: FlashInfer's
        if states:
            named |= {"mamba_radix_cache_strategy": "auto", "page_size": None}
    else:
        named["page_size"] = 1
        if states:  # SGLang caches them at the end of a request alone, without a GPU
            named["disable_overlap_schedule"] = True
    return named


def bound(load: engine_pb2.Load) -> None:
    """Torch keeps blocks of all sizes that it once made, until the device is full; `most_bytes` is when it is for this
    process."""
    most = int(load.options.get("most_bytes", 0))
    if most and kind_of(load.device) == "cuda":
        total = torch.cuda.get_device_properties(load.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), load.device)


def check_pool(wanted_tokens: int, tokens: int) -> None:
    """Raises RuntimeError when SGLang found less memory than it was told to take."""
    if tokens < wanted_tokens:
        raise RuntimeError(f"SGLang made a pool of {tokens} tokens instead of {wanted_tokens}: the device is too full")
