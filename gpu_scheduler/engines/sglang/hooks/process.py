"""Hooks that let one process build model after model, from what is in the folder now: no sockets, no watchdog, process
groups made once, nothing remembered, nothing made up.

Imports SGLang: only the engine process may import this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.policy.rope import for_sglang
from gpu_scheduler.engines.sglang.step import current
from gpu_scheduler.engines.sglang.weights.read_ahead import Tensors, or_as_ever

_made: list[tuple[int, int]] = []
"""The layout (tensor, pipeline) of the process groups of this process."""


def parallel_groups(original: Callable[..., None], **arguments: Any) -> None:
    """torch.distributed is initialised once in a process; later models of the same layout use the same groups."""
    layout = (arguments["tp_size"], arguments["pp_size"])
    if not _made:
        with _one_group_for_the_same_ranks():
            original(**arguments)
        _made.append(layout)
        return
    if _made != [layout]:
        raise RuntimeError(f"this process has groups for {_made[0]} devices, the model wants {layout}")
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    initialize_dp_attention(server_args=arguments["server_args"], model_config=arguments["model_config"])


@contextmanager
def _one_group_for_the_same_ranks() -> Iterator[None]:
    """SGLang makes a dozen groups, and each of gloo's has a thread that wakes up a hundred times a second. Most are of
    the same ranks: of all of them, and of each alone. One of gloo's for each of these, and on GPUs one of NCCL's,
    suffice: an engine's ranks use them one after the other, in the same order."""
    import torch.distributed as distributed

    new_group = distributed.new_group
    made: dict[tuple[tuple[int, ...], bool], Any] = {}

    def one_of_each(ranks: Any = None, timeout: Any = None, backend: str | None = None, **more: Any) -> Any:
        world = range(distributed.get_world_size())
        members = tuple(world if ranks is None else ranks)
        on_host = backend == "gloo" or distributed.get_backend() == "gloo"
        if members == tuple(world) and (not on_host or distributed.get_backend() == "gloo"):
            return distributed.group.WORLD
        if (members, on_host) not in made:
            made[members, on_host] = new_group(ranks, timeout, backend, **more)
        return made[members, on_host]

    distributed.new_group = one_of_each  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed.new_group = new_group


def watchdog(*_args: Any, **_kwargs: Any) -> None:
    """SGLang's never ends: it would keep every model that left alive, and signal our parent when it finds it
    stuck. The gpu_scheduler watches its engines itself."""


def ipc_channels(scheduler: Any, _port_args: Any) -> None:
    """Our outputs where SGLang has sockets to its tokenizer and detokenizer processes, which do not exist here."""
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

    outputs = current.instance().outputs
    scheduler.load_snapshot_writer = None
    scheduler.ipc_channels = SchedulerIpcChannels(
        recv_from_tokenizer=None,
        recv_from_rpc=None,
        send_to_tokenizer=outputs,
        send_to_detokenizer=outputs,
        send_metrics_from_scheduler=None,
    )


def read_again(original: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang remembers a configuration by its path; the folder may hold another checkpoint by now."""
    return original.__wrapped__(*args, **kwargs)


def configuration(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A configuration, read again, whose rotary embedding SGLang understands as Transformers does."""
    config = read_again(original, *args, **kwargs)
    told, positions = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if told and positions and not any(isinstance(value, dict) for value in told.values()):
        beside = getattr(config, "original_max_position_embeddings", None)
        config.rope_parameters = for_sglang(told, positions, beside, current.instance().load.model.context_tokens)
    return config


def files(original: Callable[..., Tensors], names: list[str], *args: Any, **more: Any) -> Tensors:
    """SGLang maps a file and copies each tensor out of the mapping: one thread takes the page faults, and what a GPU is
    given so goes through a small buffer of the driver's."""
    return or_as_ever(current.instance().reader, original, names, *args, **more)


def never_make_up(_parameter: Any, dim: int, _start: int, length: int) -> None:
    """On a CPU SGLang fills up weights that are too short with zeros, because it widens some models. Where it did not
    widen this one, short means broken. Raises ValueError."""
    if length > 0 and length not in current.instance().paddings:
        raise ValueError(f"a tensor of the checkpoint lacks {length} of the model's places in dimension {dim}")


_CONFIGURATIONS = "sglang.srt.utils.hf_transformers"
_MANAGERS = "sglang.srt.managers"
HOOKS = [
    Hook("sglang.srt.distributed.bootstrap._init_parallel_groups", parallel_groups, "AROUND"),
    Hook(f"{_CONFIGURATIONS}.config.get_config", configuration, "AROUND"),
    Hook(f"{_CONFIGURATIONS}.common.get_generation_config", read_again, "AROUND"),
    Hook("sglang.srt.model_loader.weight_utils.safetensors_weights_iterator", files, "AROUND"),
    Hook("sglang.srt.model_loader.weight_utils.reset_param_data_if_needed", never_make_up, "BEFORE"),
    Hook(f"{_MANAGERS}.scheduler_components.invariant_checker.create_scheduler_watchdog", watchdog, "REPLACE"),
    Hook(f"{_MANAGERS}.scheduler.Scheduler.init_ipc_channels", ipc_channels, "REPLACE"),
]
