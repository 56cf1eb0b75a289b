"""Removes what SGLang keeps for the life of a process and what a model must not leave to the next. Imports SGLang: only
the engine process may import this."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
from sglang.srt.layers.rotary_embedding import factory
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool
from sglang.srt.utils.common import CachedKernel

from gpu_scheduler.engines.sglang.kv.prefix_tree import unlink


def forget() -> None:
    """Clears SGLang's globals once a model has left and its graphs are gone.

    - The buffers that graphs read their inputs from are shared by name and size. The next model would warm up with the
      slots of the last one's requests in them, write there, and nothing may be mapped there any more.
    - The logits of all graphs are one buffer, in memory of the model (`graph_memory`).
    - Graphs' memory: a pool whose graphs are gone is returned to the device.
    - Tables of rotary embeddings, some megabytes for each shape that was ever here.
    - The places of experts: SGLang fails an assertion if a model finds those of another one, also one without experts.
    - Compiled kernels for adapters: SGLang finds them by sizes of the layer alone, and they are for one rank and type.
    - Results of methods that SGLang's modules cache (`functools.lru_cache`): each keeps the module that it is of.
    """
    input_buffers._forward_input_buffer_pool.clear()
    GraphSharedOutput._process_shared = None
    set_global_graph_memory_pool(None)
    factory._ROPE_DICT.clear()
    set_global_expert_location_metadata(None, allow_overwrite=True)
    for part in ("expand", "shrink"):
        module = sys.modules.get(f"sglang.kernels.ops.lora.dense.chunked_sgmv_{part}")  # not imported without adapters
        kernel = getattr(module, f"_chunked_lora_{part}_kernel", None)
        if isinstance(kernel, CachedKernel):
            kernel._clear_cache()
    for sglang_class in _classes_from(torch.nn.Module):
        for attribute in vars(sglang_class).values():
            if isinstance(attribute, functools._lru_cache_wrapper):
                attribute.cache_clear()


def _classes_from(base: type) -> Iterator[type]:
    """SGLang's classes that are derived from `base`; those derived from several bases come several times."""
    derived: type
    for derived in base.__subclasses__():
        if derived.__module__.startswith("sglang."):
            yield derived
        yield from _classes_from(derived)


def prefixes(scheduler: Any) -> None:
    """Flushes the prefix cache and unlinks the nodes of its tree; SGLang must be idle."""
    root = scheduler.tree_cache.root_node
    flushed = scheduler.flush_cache()
    assert flushed, "SGLang is not idle"
    unlink(root)


Parts = dict[str, weakref.ref[Any]]
"""Weak references to parts of a model that hold memory of its device, by what the parts are called in logs."""


def parts_of(scheduler: Any) -> Parts:
    """Weak references to the parts of `scheduler`'s model that nobody may refer to once the model has left."""
    runner = scheduler.tp_worker.model_runner
    parts = {
        "model": runner.model,
        "attention": runner.attn_backend,
        "table of slots": runner.req_to_token_pool,
        "KV pool": runner.token_to_kv_pool,
    }
    return {name: weakref.ref(part) for name, part in parts.items() if part is not None}


def take_apart(scheduler: Any) -> None:
    """Clears SGLang's objects for a model of their attributes, so that a remaining reference to one of them keeps no
    more than that one. On GPUs there is a reference that the collector does not see, and it kept all graphs with their
    memory for the life of the process."""
    worker = scheduler.tp_worker
    runner = worker.model_runner
    for graphs in (runner.prefill_cuda_graph_runner, runner.decode_cuda_graph_runner):
        if (backend := getattr(graphs, "backend", None)) is not None:
            backend.cleanup()
    for each in (runner.prefill_cuda_graph_runner, runner.decode_cuda_graph_runner, runner, worker, scheduler):
        if each is not None:
            vars(each).clear()
