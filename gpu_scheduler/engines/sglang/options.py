"""Settings of one Load: the engine's own options, and SGLang's arguments made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gpu_scheduler.engines.sglang.errors import BrokenModel, CommandError

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

    from protos import common_pb2

CONTEXT_SLACK_TOKENS = 8
"""SGLang keeps a few tokens of its context back; with so many more, a request may fill the model's own context to
the last token."""


@dataclass(frozen=True)
class Options:
    """`Load.options`, all optional. Times in milliseconds, memory in bytes or extents."""

    chunked_prefill_size: int = 512
    """Prompt tokens of one prefill step: how long a neighbour's decode may wait."""
    max_running_requests: int = 32
    kv_span_bytes: int = 8 << 30
    """Addresses reserved for KV: the most that a limit can ever let this instance map. Costs a byte of memory per
    token."""
    reserve_low: int = 1
    reserve_high: int = 4
    """Marks of the driver's reserve of mapped, unused extents."""
    soft_wait_ms: int = 5
    """How long to wait for balloond when cached prefixes could be evicted instead."""
    hard_wait_ms: int = 50
    """How long to wait when a running request would be retracted otherwise."""
    park_after_ms: int = 200
    """How long a request may lack memory while nothing runs before it goes back to the shared queue."""
    linger_ms: int = 250
    """How long an emptied extent is kept for the next request while requests run. An idle engine keeps none."""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Options:
        """Raises CommandError for an unknown name or a value that is no number."""
        known = {field.name for field in fields(cls)}
        values: dict[str, int] = {}
        for name, text in given.items():
            if name not in known:
                raise CommandError(f"unknown engine option {name!r}; known are {', '.join(sorted(known))}")
            try:
                values[name] = int(text)
            except ValueError:
                raise CommandError(f"engine option {name} is a whole number, not {text!r}") from None
        return cls(**values)


def server_args(model: common_pb2.ModelSpec, device: str, options: Options, loader: type) -> ServerArgs:
    """SGLang's arguments for a model on a CPU device. Raises BrokenModel when SGLang cannot read the model's
    configuration."""
    from sglang.srt.server_args import ServerArgs

    if device.partition(":")[0] != "cpu":
        raise CommandError(f"this engine serves cpu devices; it was given {device!r}")
    arguments: dict[str, Any] = {
        "model_path": model.path,
        "served_model_name": model.name,
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "dtype": "float32",
        "load_format": loader,
        "page_size": 1,
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,
        "disable_radix_cache": False,
        "context_length": model.context_tokens + CONTEXT_SLACK_TOKENS if model.context_tokens else None,
        "chunked_prefill_size": options.chunked_prefill_size,
        "max_running_requests": options.max_running_requests,
        # The shared queue's order is the order in which waiting requests start; what runs is not pushed aside.
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": True,
        "schedule_low_priority_values_first": True,
        "disable_priority_preemption": True,
        "sleep_on_idle": True,
        "random_seed": 0,
        "watchdog_timeout": 3600,
        "log_level": "warning",
        "model_loader_extra_config": '{"enable_multithread_load": false}',
    }
    try:
        return ServerArgs(**arguments)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenModel(f"{model.path}: {one_line(error)}") from error


def port_args() -> PortArgs:
    """No socket of SGLang's is opened, so the names are empty (its own constructor leaves files in /tmp)."""
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
    """What an exception says, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
