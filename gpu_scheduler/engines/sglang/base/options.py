"""Settings of one Load: the engine's own options, and SGLang's arguments made from them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang.base.errors import CommandError
from gpu_scheduler.engines.sharing.prefill_graphs import graph_tokens

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

    from protos import common_pb2

CONTEXT_SLACK_TOKENS = 8
"""Tokens added to SGLang's context length: SGLang holds a few tokens of its context back, and with these a request may
fill the model's own context to the last token."""

_OF_STATES = ("linear_", "mamba_num_heads")
"""Beginnings of keys of config.json that only models with states have."""


@dataclass(frozen=True)
class Options:
    """Settings in `Load.options`, all optional. Times are in milliseconds, memory in bytes or extents."""

    page_size: int = 1
    """Tokens per page of KV, the unit in which KV is allocated, cached and freed; 1 to 64."""
    chunked_prefill_size: int = 512
    """Most prompt tokens of one prefill step, which bounds how long a neighbour engine's decode step may wait."""
    max_running_requests: int = 32
    """Most requests that run at once; others wait in the shared queue. On a GPU CUDA graphs are captured for batches of
    up to this size."""
    kv_span_bytes: int = 8 << 30
    """Bytes of addresses reserved for KV: the most that a limit can ever let this instance map. They cost a byte of
    memory per page."""
    reserve_low: int = 1
    """Fewest extents that the driver keeps mapped ahead of need while requests run (`balloond/driver/kv`)."""
    reserve_high: int = 4
    """Most extents that the driver keeps mapped ahead of need, used where growth is fast."""
    large_extent: int = 8
    """Size of a large extent in KV extents. Growth requests large extents where four of them are missing at once; 1:
    never."""
    soft_wait_ms: int = 5
    """Milliseconds to wait for balloond when cached prefixes could be evicted instead."""
    hard_wait_ms: int = 50
    """Milliseconds to wait for balloond when a running request would be retracted otherwise."""
    park_after_ms: int = 200
    """Milliseconds that a request may lack memory while nothing runs before it goes back to the shared queue."""
    linger_ms: int = 250
    """Milliseconds that an emptied extent is kept for the next request while requests run. An idle engine keeps
    none."""
    overlap: int = 0
    """1: SGLang prepares a step while the one before runs (overlap scheduling); 0: it does not."""
    cuda_graphs: int = 1
    """1: decode steps run as CUDA graphs; 0: without them, two to six times slower, for analysing a single step."""
    probe_together: int = 0
    """Requests of the engine's own measurement (`model/probe.py`) that together continue where its measured request
    ended, after one that does so alone; 0: none do."""
    prefill_graph_tokens: int = 0
    """Most prompt tokens of a prefill step that runs as CUDA graphs, in pieces, as SGLang does by default for steps of
    any size. On a GPU the default depends on the model (`engines/sharing/prefill_graphs.py`). 0: no graphs; none either
    with several ranks (not tried yet), without `cuda_graphs`, for models of more than text, or for embedding models."""
    graphs_leave: int = 1
    """1: memory of CUDA graphs leaves the device while the model sleeps; 0: it stays."""
    small_stack: int = 1
    """1: a sleeping process lowers the device's stack per thread; 0: it keeps the stack of all threads that its device
    could run."""
    enforce_quota: int = 1
    """1: torch is limited to what is booked for this process on the device; 0: it may take more."""
    deterministic: int = 0
    """1: SGLang's batch-invariant kernels, slower: an answer does not depend on the requests that run beside it. 0: its
    ordinary ones."""
    read_threads: int = 0
    """Threads that read a checkpoint's safetensors files ahead. 0: SGLang maps the files, and they are read as it needs
    them, which is best where weights are copied straight out of the mapping, as on a CPU."""
    read_ahead_bytes: int = 1 << 30
    """Most bytes of a checkpoint that lie in host memory while `read_threads` read it."""
    stall_trace_ms: int = 0
    """Milliseconds after which an engine that stands still logs its stacks (`stalls`), for finding out where; 0:
    never."""
    random_weights: int = 0
    """1: random weights from a seed, for benchmarks; the folder needs a configuration, and at most headers of files."""

    @property
    def scored_together(self) -> int:
        """Prompt tokens whose log-probabilities are computed at a time. Each takes several copies of a row of the
        vocabulary; `quota.draw_most` measures the quota with this many rows."""
        return max(_LEAST_SCORED, min(_MOST_SCORED, self.max_running_requests))

    @classmethod
    def parse(cls, given: Mapping[str, str], device: str, model: common_pb2.ModelSpec | None = None) -> Options:
        """Options from the text of `Load.options`, over the defaults of `device` and `model`. Raises CommandError for
        an unknown name or a value that is no whole number."""
        known = {field.name for field in fields(cls)}
        values = {}
        if kind_of(device) == "cuda":
            active = 0 if model is None else model.active_bytes or model.weights_bytes
            weights = active // max(1, model.devices if model is not None else 1)
            values = {**ON_A_GPU, "prefill_graph_tokens": graph_tokens(weights)}
        for name, text in given.items():
            if name in _REMOVED:
                continue
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                known_are = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
                raise CommandError(f"unknown engine option {name!r}; {known_are}")
            try:
                values[name] = int(text)
            except ValueError:
                raise CommandError(f"engine option {name} is a whole number, not {text!r}") from None
        return cls(**values)


ON_A_GPU = {
    "page_size": 16,
    "chunked_prefill_size": 2048,
    "max_running_requests": 256,
    "overlap": 1,
    "read_threads": 8,
    "kv_span_bytes": 192 << 30,  # more than any GPU has: addresses cost nothing
    "reserve_low": 4,
    "reserve_high": 32,
    "probe_together": 3,
}
"""Defaults of `Options` that differ on a GPU."""
_LEAST_SCORED, _MOST_SCORED = 32, 256
"""Bounds of `scored_together`, in tokens: with fewer at a time the rows of the vocabulary would be read too often, more
would need a private quota of their own."""
_LEAST_PREFILL_GRAPH, _PREFILL_HALVES = 16, 128
"""Sizes of prefill graphs, in tokens. Steps shorter than `_LEAST_PREFILL_GRAPH` are padded to it if they have half of
it; from `_PREFILL_HALVES` on, sizes are half an octave apart."""
_ADAPTER_WAITS_S = 0.25
"""Seconds after which requests for an adapter that finds no place in the batch have one of the others make way: no
request for that one starts until the waiting adapter has its place."""
_WITH_TWO_SHAPES = ("gemma4_text", "gemma4_unified_text")
"""Types of models, as config.json names them, whose layers with a window have other heads than the other layers."""
_WITH_WINDOW_POOL = (*_WITH_TWO_SHAPES, "gpt_oss")
"""Types of models, as config.json names them, whose layers with a window have a KV pool of their own: those of
`ModelClass.window_pool`."""
_REMOVED = ("window_pool",)
"""Names of options that are gone. An older gpu_scheduler may still pass them on; they have no effect."""
_PROMPTS_WITH_TABLES = 32
"""Most prompts of a prefill step of a model with a window pool under FlashAttention. SGLang makes tables of 16 bytes
for each prompt and each token of the longest one: 64 MiB for 131,072 tokens, which a quota has beside what was
measured."""
_BLOCK_TOKENS = 64
"""Tokens of a block in kernels of linear attention."""
MAX_PAGE_SIZE = 64
"""Most tokens per page of KV: FlashAttention 3 reads the unused tail of larger pages (docs/lab/measurements.md)."""


def kind_of(device: str) -> str:
    """ "cpu" or "cuda", the kind of a device such as "cuda:0". Raises CommandError for any other."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise CommandError(f"this engine serves cpu and cuda devices; it was given {device!r}")
    return kind


def arguments(
    model: common_pb2.ModelSpec, device: str, options: Options, loader: type, ranks: int = 1, peers: bool = True
) -> dict[str, Any]:
    """SGLang's arguments, by name, for a model on `device`, served by `ranks` processes on as many devices. `peers`:
    these devices can read each other's memory. Raises CommandError for a `page_size` out of range."""
    if not 1 <= options.page_size <= MAX_PAGE_SIZE:
        raise CommandError(f"page_size is from 1 to {MAX_PAGE_SIZE}, not {options.page_size}")
    return {
        "model_path": model.path,
        "tp_size": ranks,
        "served_model_name": model.name,
        "is_embedding": model.HasField("embedding"),
        "grammar_backend": "none",
        "sampling_backend": "pytorch",
        "load_format": loader,
        "page_size": options.page_size,
        "disable_overlap_schedule": not options.overlap,
        "skip_tokenizer_init": True,
        "disable_radix_cache": False,
        "context_length": model.context_tokens + CONTEXT_SLACK_TOKENS if model.context_tokens else None,
        "chunked_prefill_size": _chunk(model, device, options),
        "max_running_requests": options.max_running_requests,
        # The shared queue's order is the order in which waiting requests start; running requests are not preempted.
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "disable_priority_preemption": True,
        "sleep_on_idle": True,
        "random_seed": 0,
        # Without a pool of their own windows lie in the pool of the other layers, and nothing of it leaves early.
        "disable_hybrid_swa_memory": not has_window_pool(Path(model.path)),
        "swa_full_tokens_ratio": 1.0,
        **(_with_states(options) if has_states(Path(model.path)) else {}),
        "watchdog_timeout": 3600,
        "log_level": "warning",
        "model_loader_extra_config": '{"enable_multithread_load": false}',
        # SGLang's own all-reduce reads the memory of peers, its buffers and those of CUDA graphs, by CUDA IPC, which
        # works with ordinary memory only. So all of this stays torch's: tens of MiB of buffers, and the graph memory
        # that `graphs_leave` would return, are private quota that a sleeping engine keeps. Without peers the all-reduce
        # is NCCL's, and slower.
        "disable_custom_all_reduce": not peers,
        # FlashInfer's all-reduce, which SGLang chooses for many classes of models on several Hopper GPUs, has buffers
        # of its own that peers map, and multiplies by norms that only reading a checkpoint prepares: no image has them.
        "enforce_disable_flashinfer_allreduce_fusion": True,
        **_adapters(model, device),
        **(_for_gpu(model, options, ranks) if kind_of(device) == "cuda" else _FOR_CPU),
    }


def server_args(
    model: common_pb2.ModelSpec, device: str, options: Options, loader: type, ranks: int = 1, peers: bool = True
) -> ServerArgs:
    """The ServerArgs object made from `arguments`. Raises whatever SGLang raises when it cannot read the model's
    configuration."""
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(**arguments(model, device, options, loader, ranks, peers))


def _chunk(model: common_pb2.ModelSpec, device: str, options: Options) -> int:
    """Most tokens of a prefill step. On a GPU no more than the context has: the engine measures its private memory with
    a step of one request (`model/probe.py`), and a step of several would take more."""
    if model.embedding.pooling:  # an encoder's prompt is computed as a whole, since all its tokens attend to all
        return -1
    if kind_of(device) != "cuda" or options.chunked_prefill_size <= 0 or not model.context_tokens:
        return options.chunked_prefill_size
    return min(options.chunked_prefill_size, model.context_tokens)


def _adapters(model: common_pb2.ModelSpec, device: str) -> dict[str, Any]:
    """SGLang's arguments for a model with adapters: none are read before a request names them."""
    if not model.HasField("adapters"):
        return {}
    return {
        "enable_lora": True,
        "max_loras_per_batch": model.adapters.slots,
        "max_lora_rank": model.adapters.rank,
        "lora_target_modules": list(model.adapters.modules),
        "lora_drain_wait_threshold": _ADAPTER_WAITS_S,
        "lora_backend": "csgmv" if kind_of(device) == "cuda" else "torch_native",
    }


_FOR_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
}


def _for_gpu(model: common_pb2.ModelSpec, options: Options, ranks: int) -> dict[str, Any]:
    import torch

    hopper = torch.cuda.get_device_capability() == (9, 0)
    return {
        "device": "cuda",
        # SGLang knows no FlashAttention for two shapes of heads.
        "attention_backend": "fa3" if hopper and not _has_two_shapes(Path(model.path)) else "triton",
        # With latent attention SGLang would make keys and values of all heads of long cached prefixes, gigabytes for a
        # step, in memory that no quota has room for. With this argument, steps attend over the latent rows themselves.
        "disable_chunked_prefix_cache": True,
        "kv_cache_dtype": "fp8_e4m3" if model.kv_dtype == "fp8" else "auto",
        "disable_cuda_graph": not options.cuda_graphs,
        "cuda_graph_bs_decode": graph_sizes(options.max_running_requests),
        **prefill_graphs(_prefill_graph_tokens(model, options, ranks)),
        **(_with_states_on_gpu(model, options) if has_states(Path(model.path)) else {}),
        **prompts_with_tables(Path(model.path)),
        "enable_deterministic_inference": bool(options.deterministic),
        # It sizes nothing here (`profiled_bytes` in `hooks/memory.py`), but SGLang would try to guess it.
        "mem_fraction_static": 0.9,
    }


def _prefill_graph_tokens(model: common_pb2.ModelSpec, options: Options, ranks: int) -> int:
    """Prompt tokens of the largest prefill step of a catalogue's model that may run as a CUDA graph; 0: none. Such a
    step is never longer than the model's context: attention would read beyond the request's row in the table of
    pages."""
    if model.HasField("embedding") or model.HasField("adapters"):
        return 0
    most = prefill_graph_tokens(model.path, options, ranks)
    return min(most, model.context_tokens) if model.context_tokens else most


def prefill_graph_tokens(path: str, options: Options, ranks: int) -> int:
    """Prompt tokens of the largest prefill step that may run as a CUDA graph; 0: none. There are none where SGLang by
    default would have none: without CUDA graphs, and for models of more than text. SGLang would not refuse prefill
    graphs that are requested by name, as these are."""
    if not options.cuda_graphs or ranks > 1 or _sees_or_hears(Path(path)):
        return 0
    whole = options.chunked_prefill_size
    return min(options.prefill_graph_tokens, whole) if whole > 0 else options.prefill_graph_tokens


def _config(folder: Path) -> dict[str, Any]:
    """The configuration of the model in `folder`; empty if that cannot be read, which SGLang reports itself."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text_config(folder: Path) -> dict[str, Any]:
    """The part of the configuration of the model in `folder` that describes its language model."""
    config = _config(folder)
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def has_window_pool(folder: Path) -> bool:
    """Whether the layers with a window of the model in `folder` have a KV pool of their own, by its configuration."""
    return _text_config(folder).get("model_type") in _WITH_WINDOW_POOL


def _has_two_shapes(folder: Path) -> bool:
    """Whether layers with a window have other heads than the other layers, so that one pool cannot hold the KV of both,
    by the configuration of the model in `folder`."""
    return _text_config(folder).get("model_type") in _WITH_TWO_SHAPES


def has_states(folder: Path) -> bool:
    """Whether requests of the model in `folder` have states beside the KV of their tokens, by its configuration."""
    return any(key.startswith(_OF_STATES) for key in _text_config(folder))


def _with_states(options: Options) -> dict[str, Any]:
    """SGLang's arguments for a model whose requests have states. States are cached at the end of a request and where a
    prompt parts from a cached prefix, where SGLang's other strategies keep two more for each request that runs; that
    takes pages of one token."""
    return {
        "page_size": 1,
        "mamba_radix_cache_strategy": "no_buffer",
        # Slots are addresses. SGLang takes three for each request that may run.
        "max_mamba_cache_size": 3 * options.max_running_requests,
    }


def _with_states_on_gpu(model: common_pb2.ModelSpec, options: Options) -> dict[str, Any]:
    """SGLang's arguments, on a GPU, for a model whose requests have states."""
    return kernels_with_states(_config(Path(model.path))) | prompts_with_states(_chunk(model, "cuda", options))


def kernels_with_states(config: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's arguments for the kernels of a model whose requests have states, with this configuration. By itself
    SGLang chooses FlashInfer's on Hopper: those of linear attention are compiled anew in every process, one at the
    first prompt and another at the first step of several prompts, and those of Nemotron-H's experts by nvcc, for many
    minutes. Triton's are compiled once for a host."""
    experts = config.get("model_type") == "nemotron_h" and not config.get("quantization_config")
    return {"linear_attn_prefill_backend": "triton", **({"moe_runner_backend": "triton"} if experts else {})}


def prompts_with_states(chunk: int) -> dict[str, Any]:
    """SGLang's arguments for the prompts of a step of at most `chunk` tokens, where requests have states; 0: no bound.
    Every prompt takes whole blocks of tokens, and one that continues a cached prefix or has Mamba layers a copy of its
    states, in memory that was measured with a step of one prompt. So no more prompts begin in a step than would fill it
    with a block each."""
    return {"prefill_max_requests": max(1, chunk // _BLOCK_TOKENS)} if chunk > 0 else {}


def prompts_with_tables(folder: Path) -> dict[str, Any]:
    """SGLang's arguments for the prompts of a step of the model in `folder`, if FlashAttention makes tables for a
    window pool. Triton, which models with two shapes of heads have, makes none of that size."""
    tables = has_window_pool(folder) and not _has_two_shapes(folder)
    return {"prefill_max_requests": _PROMPTS_WITH_TABLES} if tables else {}


def _sees_or_hears(folder: Path) -> bool:
    """Whether the model in `folder` takes images or sound, by its configuration."""
    config = _config(folder)
    return any(f"{kind}_config" in config for kind in ("vision", "audio", "thinker"))


def prefill_graphs(most: int) -> dict[str, Any]:
    """SGLang's arguments for prefill graphs of steps of up to `most` prompt tokens; 0: no graphs."""
    if not most:
        return {"disable_prefill_cuda_graph": True}
    octaves = [1 << n for n in range(most.bit_length())]
    # Below, steps of all sizes take as long: they read the weights.
    sizes = {most, *octaves, *(3 * octave // 2 for octave in octaves if octave >= _PREFILL_HALVES)}
    kept = sorted(size for size in sizes if size == most or _LEAST_PREFILL_GRAPH <= size < most)
    return {"cuda_graph_backend_prefill": "breakable", "cuda_graph_bs_prefill": kept}


def graph_sizes(most: int) -> list[int]:
    """Batch sizes, up to `most`, that get a CUDA graph of their own; other batches are padded to the next size. Each
    graph costs a cold start about a tenth of a second, and a step that is padded by a quarter costs a few percent, so
    sizes are an eighth to a quarter apart."""
    sizes = {1, 2, 4, 8, most}
    for octave in range(3, most.bit_length()):
        sizes |= {(1 << octave) + part * (1 << octave) // 4 for part in range(4)}
    return sorted(size for size in sizes if size <= most)


def port_args() -> PortArgs:
    """SGLang's PortArgs with empty names, because none of its sockets is opened. (Its own constructor leaves files in
    /tmp.)"""
    from sglang.srt.server_args import PortArgs

    return PortArgs(
        tokenizer_ipc_name="",
        scheduler_input_ipc_name="",
        detokenizer_ipc_name="",
        nccl_port=0,
        rpc_ipc_name="",
        metrics_ipc_name="",
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )


def one_line(error: BaseException) -> str:
    """The type and message of an exception in one line of at most 400 characters of message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
