"""Hooks that let one process build model after model, each from the files that its folder has now. Process groups are
made once; SGLang keeps no configuration and no watchdog of an earlier model, and fills up no tensor that is too short.

Imports SGLang: only the engine process may import this.

Target in SGLang                      Why                                        Without it
------------------------------------  -----------------------------------------  ---------------------------------------
bootstrap                             torch.distributed is initialised once in   the second model cannot be built, and a
.init_parallel_runtime                a process: later models of the same        dozen threads of gloo wake up a hundred
                                      layout use the same groups, one for each   times a second
                                      set of ranks
config.get_config                     A configuration is read again for each     a new checkpoint in the same folder
                                      model, with a rotary embedding that        gets the old configuration; some rotary
                                      SGLang understands as Transformers does    tables are wrong, or fail
nemotron_h.NemotronHConfig.__init__   Layers may have the names that newer       SGLang refuses these names
                                      versions of Transformers write
weight_utils                          Several threads read the files ahead,      loading is slow: one thread takes the
.safetensors_weights_iterator         into memory that a GPU copies from by      page faults of a mapping
                                      itself
weight_utils                          A tensor that is too short is refused      on a CPU a broken checkpoint is filled
.reset_param_data_if_needed           where SGLang did not widen the layer       up with zeros and served
model_runner.adjust_config            More ranks than key-value heads have the   on a CPU SGLang adds heads of zeros; it
_with_unaligned_cpu_tp                same heads, as on GPUs                     fails if layers have heads of two sizes
invariant_checker                     The gpu_scheduler watches its engines      SGLang's watchdog keeps every model
.create_scheduler_watchdog            itself                                     that left alive, and signals our parent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpu_scheduler.engines.sglang.hooks.hook import Hook
from gpu_scheduler.engines.sglang.policy.rope import for_latent, for_sglang
from gpu_scheduler.engines.sglang.step import current
from gpu_scheduler.engines.sglang.weights import encoder
from gpu_scheduler.engines.sglang.weights.read_ahead import Tensors, or_as_ever

_NEWER_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names that SGLang knows for Nemotron-H's layers, by those in files of newer Transformers."""
_made: list[tuple[int, int]] = []
"""(tensor, pipeline) sizes of the process groups of this process; empty before the first model."""


def parallel_groups(original: Callable[..., None], *, server_args: Any, **arguments: Any) -> None:
    """Makes process groups for the first model; later models of the same layout use them. Raises RuntimeError for
    another layout."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.runtime_context import get_device, get_parallel

    layout = (get_parallel().tp_size, get_parallel().pp_size)
    if not _made:
        with _one_group_for_the_same_ranks():
            original(server_args=server_args, **arguments)
        _made.append(layout)
        return
    if _made != [layout]:
        raise RuntimeError(f"this process has groups for {_made[0]} devices, the model wants {layout}")
    torch.get_device_module(get_device().device).set_device(get_device().gpu_id)
    initialize_dp_attention(server_args=server_args)


@contextmanager
def _one_group_for_the_same_ranks() -> Iterator[None]:
    """Context in which groups that SGLang makes of the same ranks are one group. SGLang makes a dozen, most of them of
    all ranks or of a single one, and each group of gloo's has a thread that wakes up a hundred times a second. For each
    set of ranks one group of gloo's, and on GPUs one of NCCL's, is enough: all ranks use them one after the other, in
    the same order."""
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
    """Makes no watchdog, since the gpu_scheduler watches its engines. SGLang's never ends: it would keep a model in
    memory that has left, and would signal our parent if it took the model for stuck."""


def configuration(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads a configuration, and adapts its rotary embedding so that SGLang understands it as Transformers does.
    SGLang's cache is not asked, since it knows configurations by their path, where another checkpoint may be by now. An
    encoder gets the type of its positions, which newer Transformers leave out because there is only one."""
    config = original.__wrapped__(*args, **kwargs)
    if encoder.is_one(current.model().load.model) and not hasattr(config, "position_embedding_type"):
        config.position_embedding_type = "absolute"
    rope, positions = getattr(config, "rope_parameters", None), getattr(config, "max_position_embeddings", None)
    if rope and positions and not any(isinstance(value, dict) for value in rope.values()):
        if getattr(config, "kv_lora_rank", None):
            on_cpu = current.model().device.type == "cpu"
            config.rope_parameters = for_latent(rope, positions, on_cpu)
            return config
        original_positions = getattr(config, "original_max_position_embeddings", None)
        context = current.model().load.model.context_tokens
        config.rope_parameters = for_sglang(rope, positions, original_positions, context)
    return config


def layer_names(original: Callable[..., None], config: Any, **values: Any) -> None:
    """Makes the configuration of a Nemotron-H, with SGLang's names for its layers in place of newer ones."""
    for key in ("layers_block_type", "mtp_layers_block_type"):
        if values.get(key) is not None:
            values[key] = [_NEWER_NAMES.get(name, name) for name in values[key]]
    original(config, **values)


def files(original: Callable[..., Tensors], names: list[str], *args: Any, **more: Any) -> Tensors:
    """(name, tensor) of all tensors in these files, as the model's reader reads them. SGLang would map a file and copy
    each tensor out of the mapping: one thread would take the page faults, and copies to a GPU would go through a small
    buffer of the driver's."""
    return or_as_ever(current.model().reader, original, names, *args, **more)


def never_make_up(_parameter: Any, dim: int, _start: int, length: int) -> None:
    """Raises ValueError for a tensor of the checkpoint that is too short. On a CPU SGLang widens the layers of some
    models, and pads all short tensors with zeros for that. A tensor that is short by another length than such a layer
    was widened by is broken."""
    if length > 0 and length not in current.model().paddings:
        raise ValueError(f"a tensor of the checkpoint lacks {length} of the model's places in dimension {dim}")


def no_more_heads(original: Callable[..., Any], model_config: Any, load_config: Any, ranks: int) -> Any:
    """Widens the layers of a model on a CPU as SGLang does, but adds no heads: the loader has refused a model whose
    heads do not divide."""
    return original(model_config, load_config, math.gcd(ranks, model_config.get_total_num_kv_heads()))


_CONFIGURATIONS = "sglang.srt.utils.hf_transformers"
_MANAGERS = "sglang.srt.managers"
HOOKS = [
    Hook("sglang.srt.distributed.bootstrap.init_parallel_runtime", parallel_groups, "AROUND"),
    Hook(f"{_CONFIGURATIONS}.config.get_config", configuration, "AROUND"),
    Hook("sglang.srt.configs.nemotron_h.NemotronHConfig.__init__", layer_names, "AROUND"),
    Hook("sglang.srt.model_loader.weight_utils.safetensors_weights_iterator", files, "AROUND"),
    Hook("sglang.srt.model_loader.weight_utils.reset_param_data_if_needed", never_make_up, "BEFORE"),
    Hook("sglang.srt.model_executor.model_runner.adjust_config_with_unaligned_cpu_tp", no_more_heads, "AROUND"),
    Hook(f"{_MANAGERS}.scheduler_components.invariant_checker.create_scheduler_watchdog", watchdog, "REPLACE"),
]
