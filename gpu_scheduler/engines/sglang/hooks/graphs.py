"""Hooks on how SGLang captures CUDA graphs: into memory that leaves while the model sleeps (`memory/graph_memory.py`).
Tables and buffers of megabytes around a capture, whose values a sleeping model does not need, go there as well: torch
would keep segments of 20 MiB for them.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
cuda_graph_setup                      Graphs are captured into memory that       a sleeping model keeps the memory of
.capture_cuda_graphs                  leaves                                     its graphs on the device
GraphSharedOutput                     Logits lie in scratch memory, which comes  their buffer stays on the device
.get_logits_buffer                    back as zeros
input_buffers.share_input_buffer      The buffer for embeddings lies there too   the largest input buffer stays on the
                                                                                 device
FlashAttentionBackend                 The tables of pages of decode graphs lie     with pages of one token they take
.init_cuda_graph_state                there too: every step writes what it reads   hundreds of MiB, where the context is
                                                                                 long, which stay on the device
decode_cuda_graph_runner.freeze_gc,   The collector is only paused during a      it collects everything four times, 0.7
prefill_cuda_graph_runner.freeze_gc   capture                                    s each, and looks at it from then on
BreakableCudaGraphBackend             Outputs of prefill graphs lie in scratch   their buffer stays on the device
._alloc_full_buffer                   memory
FullCudaGraphBackend and              cuBLAS takes its workspaces in scratch     a graph uses a workspace in ordinary
BreakableCudaGraphBackend             memory before a capture                    memory that is lost while the model
.capture_session                                                                 sleeps
FullCudaGraphBackend and              Memory is mapped ahead of each capture     mapping happens during captures
BreakableCudaGraphBackend
.capture_one
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.model_executor import input_buffers
from sglang.srt.model_executor.runner_utils.pool import set_global_graph_memory_pool
from sglang.srt.runtime_context import get_resources

from gpu_scheduler.engines.sglang.base import collector
from gpu_scheduler.engines.sglang.base.environment import has_gpu
from gpu_scheduler.engines.sglang.base.options import one_line
from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.step import current


def capture_all(original: Callable[..., Any], *, model_runner: Any, **how: Any) -> Any:
    """Captures all graphs, of prefill and of decode, which share a pool. They are captured in ordinary memory, which
    stays while the model sleeps, if they cannot be captured in ours."""
    model = current.model()
    gc.collect()  # building the model has left objects behind, which would be counted
    graphs = model.open_graphs()
    if graphs is not None:
        graphs.beside = streams_of(model_runner.model)
        slots_of_requests = model_runner.req_to_token_pool.req_to_token
        try:
            with graphs.capturing() as pool_id:
                with graphs.scratch():
                    _make_anew(slots_of_requests)
                set_global_graph_memory_pool(pool_id)
                return original(model_runner=model_runner, **how)
        except Exception as error:  # SGLang raises a plain one around torch's
            why = one_line(error)
        set_global_graph_memory_pool(None)
        input_buffers._forward_input_buffer_pool.clear()  # the logits are among them
        if model_runner.graph_shared_output is not None:
            model_runner.graph_shared_output._logits_buffers.clear()
        for table in (slots_of_requests, *graphs.tables):
            _make_anew(table)
        model.give_up_graphs(why)
    return original(model_runner=model_runner, **how)


def uncollected(_enable_cudagraph_gc: bool) -> AbstractContextManager[None]:
    """Pauses the collector in place of SGLang's freeze. SGLang collects before and after a capture, each time all that
    was ever imported, and makes the collector look at all of it from then on, also while requests are served: 0.7 s
    each time."""
    return collector.paused()


def _make_anew(tensor: torch.Tensor) -> None:
    """Replaces a tensor's memory by zeros in the memory that torch takes from now, for all that refer to the tensor.
    There must be no views of it."""
    tensor.data = torch.zeros_like(tensor)


def logits(original: Callable[..., Any], buffers: Any, vocab_size: int, *, rows: int) -> Any:
    """Makes the logits buffer in scratch memory. All graphs share it, and all models of a process: see
    `model/teardown.py`."""
    graphs = current.model().graphs
    if graphs is None:
        return original(buffers, vocab_size, rows=rows)
    with graphs.scratch():
        return original(buffers, vocab_size, rows=rows)


def prefill_output(original: Callable[..., Any], backend: Any, output: Any, size: int) -> Any:
    """Makes the buffer that graphs of prefill steps write last in scratch memory: one for all sizes, made before the
    first capture. If there are several tensors each comes here by itself."""
    graphs = current.model().graphs
    if graphs is None or not torch.is_tensor(output):
        return original(backend, output, size)
    with graphs.scratch():
        return original(backend, output, size)


def input_buffer(original: Callable[..., Any], name: str, buffer: torch.Tensor) -> Any:
    """Makes the graphs' input buffer for embeddings in scratch memory. This buffer is by far the largest, and steps of
    text neither write nor read it."""
    graphs = current.model().graphs
    if graphs is not None and name == "input_embeds":
        with graphs.scratch():
            buffer = torch.zeros_like(buffer)
    return original(name, buffer)


def page_tables(_result: None, backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """Makes FlashAttention's tables of pages for decode graphs anew in scratch memory."""
    graphs = current.model().graphs
    if graphs is not None:
        with graphs.scratch():
            for name in ("page_table", "swa_page_table"):
                if (table := backend.decode_cuda_graph_metadata.get(name)) is not None:
                    _make_anew(table)
                    graphs.tables.append(table)


def session(original: Callable[..., Any], backend: Any, stream: Any) -> Any:
    """Prepares the streams of a capture. Graphs are captured on `stream`, and parts of some (a mixture's experts) on
    streams that SGLang keeps by name, or the model has for itself."""
    graphs = current.model().graphs
    if graphs is not None:
        graphs.prepare_streams([stream, *get_resources().streams.values(), *graphs.beside])
    return original(backend, stream)


def streams_of(model: torch.nn.Module) -> list[Any]:
    """Streams that a model has for itself: attributes of its modules, and those of the files of their classes, which
    are made at the first step if not here."""
    files = {type(module).__module__ for module in model.modules()}
    makers = [getattr(sys.modules[file], _MAKES_STREAM, None) for file in sorted(files)]
    found = [make(torch.cuda) for make in makers if make is not None]
    for module in model.modules():
        for value in vars(module).values():
            found += [each for each in (value if isinstance(value, (list, tuple)) else (value,)) if _is_stream(each)]
    return list({id(each): each for each in found}.values())


def _is_stream(value: Any) -> bool:
    return isinstance(value, (torch.Stream, torch.cuda.Stream))


def capture_one(_backend: Any, *_args: Any, **_kwargs: Any) -> None:
    """Reports each capture, and maps memory ahead of it."""
    model = current.model()
    model.captures()
    if model.graphs is not None:
        model.graphs.ahead()


_MAKES_STREAM = "_get_or_create_alt_stream"
"""Name of the function in files of SGLang's models that returns the file's own stream."""
_EXECUTOR = "sglang.srt.model_executor"
_FLASH_ATTENTION = "sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend"
_BACKENDS = (
    f"{_EXECUTOR}.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend",
    f"{_EXECUTOR}.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend",
)
"""The backends of decode graphs and of prefill graphs."""
_KINDS = ("prefill", "decode")
HOOKS = [
    Hook(f"{_EXECUTOR}.model_runner_components.cuda_graph_setup.capture_cuda_graphs", capture_all, "AROUND"),
    Hook(f"{_EXECUTOR}.graph_shared_output.GraphSharedOutput.get_logits_buffer", logits, "AROUND"),
    Hook(f"{_EXECUTOR}.input_buffers.share_input_buffer", input_buffer, "AROUND"),
    # This backend cannot be imported on a machine without a GPU.
    *([Hook(f"{_FLASH_ATTENTION}.init_cuda_graph_state", page_tables, "AFTER")] if has_gpu() else []),
    *(Hook(f"{_EXECUTOR}.runner.{kind}_cuda_graph_runner.freeze_gc", uncollected, "REPLACE") for kind in _KINDS),
    Hook(f"{_BACKENDS[1]}._alloc_full_buffer", prefill_output, "AROUND"),
    *(Hook(f"{backend}.capture_session", session, "AROUND") for backend in _BACKENDS),
    *(Hook(f"{backend}.capture_one", capture_one, "BEFORE") for backend in _BACKENDS),
]
