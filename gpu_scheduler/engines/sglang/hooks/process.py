"""Hooks that let one process build model after model, from what is in the folder now: no sockets, no watchdog, process
groups made once, nothing remembered, nothing made up.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
bootstrap                             torch.distributed is initialised once in   the second model cannot be built, and a
._init_parallel_groups                a process: later models of the same        dozen threads of gloo wake up a hundred
                                      layout use the same groups, one for each   times a second
                                      set of ranks
config.get_config                     A configuration is read again for each     a new checkpoint in the same folder
                                      model, with a rotary embedding that        gets the old configuration; some rotary
                                      SGLang understands as Transformers does    tables are wrong, or fail
common.get_generation_config          It is read again for each model            a new checkpoint in the same folder
                                                                                 gets the old one's
weight_utils                          Several threads read the files ahead,      loading is slow: one thread takes the
.safetensors_weights_iterator         into memory that a GPU copies from by      page faults of a mapping
                                      itself
weight_utils                          A tensor that is too short is refused      on a CPU a broken checkpoint is filled
.reset_param_data_if_needed           where SGLang did not widen the layer       up with zeros and served
invariant_checker                     The gpu_scheduler watches its engines      SGLang's watchdog keeps every model
.create_scheduler_watchdog            itself                                     that left alive, and signals our parent
Scheduler.init_ipc_channels           Outputs go to `model/outputs.py`           SGLang opens sockets to tokenizer
                                                                                 processes that do not exist here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.policy.rope import for_sglang
from gpu_scheduler.engines.sglang.step import current
from gpu_scheduler.engines.sglang.weights import encoder
from gpu_scheduler.engines.sglang.weights.read_ahead import Tensors, or_as_ever

_made: list[tuple[int, int]] = []
"""(tensor, pipeline) sizes of the process groups of this process; empty before the first model."""


def parallel_groups(original: Callable[..., None], **arguments: Any) -> None:
    """Makes process groups for the first model; later models of the same layout use them. Raises RuntimeError for
    another layout."""
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
    """Context in which SGLang's groups of the same ranks are one. It makes a dozen groups, and each of gloo's has a
    thread that wakes up a hundred times a second. Most are of the same ranks: of all of them, and of each alone. One of
    gloo's for each of these, and on GPUs one of NCCL's, suffice: an engine's ranks use them one after the other, in the
    same order."""
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
    """Makes no watchdog. SGLang's never ends: it would keep every model that left alive, and signal our parent when it
    finds it stuck. The gpu_scheduler watches its engines itself."""


def ipc_channels(scheduler: Any, _port_args: Any) -> None:
    """Puts the engine's outputs where SGLang has sockets to its tokenizer and detokenizer processes, which do not exist
    here."""
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

    outputs = current.model().outputs
    scheduler.load_snapshot_writer = None
    scheduler.ipc_channels = SchedulerIpcChannels(
        recv_from_tokenizer=None,
        recv_from_rpc=None,
        send_to_tokenizer=outputs,
        send_to_detokenizer=outputs,
        send_metrics_from_scheduler=None,
    )


def read_again(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls SGLang's function without its cache: it remembers a configuration by its path, and the folder may hold
    another checkpoint by now."""
    return original.__wrapped__(*args, **kwargs)


def configuration(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads a configuration again and adapts its rotary embedding so that SGLang understands it as Transformers
    does. An encoder's gets what newer Transformers leave out, since it is always so."""
    config = read_again(original, *args, **kwargs)
    if encoder.is_one(current.model().load.model) and not hasattr(config, "position_embedding_type"):
        config.position_embedding_type = "absolute"
    told, positions = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if told and positions and not any(isinstance(value, dict) for value in told.values()):
        beside = getattr(config, "original_max_position_embeddings", None)
        config.rope_parameters = for_sglang(told, positions, beside, current.model().load.model.context_tokens)
    return config


def files(original: Callable[..., Tensors], names: list[str], *args: Any, **more: Any) -> Tensors:
    """Name and tensor of everything in these files, by the model's reader. SGLang maps a file and copies each
    tensor out of the mapping: one thread takes the page faults, and copies to a GPU go through a small buffer of
    the driver's."""
    return or_as_ever(current.model().reader, original, names, *args, **more)


def never_make_up(_parameter: Any, dim: int, _start: int, length: int) -> None:
    """Refuses a tensor of the checkpoint that is too short. On a CPU SGLang pads such tensors with zeros, because it
    widens some models; where it did not widen this one, short means broken. Raises ValueError."""
    if length > 0 and length not in current.model().paddings:
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
