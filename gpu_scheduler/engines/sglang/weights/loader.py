"""SGLang's model loaders for this engine, passed to it as `load_format`. Imports SGLang: only the engine process may
import this.

Each of them leaves the parameters in the weights range, before SGLang makes its pools or captures a graph.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.utils.common import reserve_rope_cache_for_long_sequences

from gpu_scheduler.engines.sglang.base import current
from gpu_scheduler.engines.sglang.base.errors import BrokenModel, NoMemory
from gpu_scheduler.engines.sglang.base.faults import fault
from gpu_scheduler.engines.sglang.base.options import Options, one_line
from gpu_scheduler.engines.sglang.memory.host_buffer import HostBuffer
from gpu_scheduler.engines.sglang.ranks.ranks import Ranks
from gpu_scheduler.engines.sglang.weights import encoder, post_processing, unset
from gpu_scheduler.engines.sglang.weights.random_weights import checkpoint
from gpu_scheduler.engines.sglang.weights.read_ahead import ReadAhead
from protos import engine_pb2
from services.telemetry import log

_log = log.get(__name__)
_SAFE = ".safetensors"
_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale")
"""Ends of the names of scales of the KV cache."""
_NAMES_SHOWN = 3
REFUSALS = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    AssertionError,
    RuntimeError,
    ImportError,
    MemoryError,
    SafetensorError,
)
"""Exceptions that SGLang and its libraries raise for a file that is cut short, a wrong shape, an unknown
architecture."""


@contextmanager
def blame(path: str) -> Iterator[None]:
    """Turns exceptions inside into a CommandError that blames the model or the host (`faults`), or NoMemory where
    memory of the device was missing. `path`: the model's folder."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NoMemory(one_line(error)) from error
    except REFUSALS as error:
        raise fault(error, path) from error


class Target(Protocol):
    """The model that is being built, as loaders see it (`model/loaded_model.py`)."""

    load: engine_pb2.Load
    options: Options
    device: torch.device
    ranks: Ranks
    server_args: Any
    """SGLang's ServerArgs for this model."""
    paddings: set[int]
    """Widths by which SGLang may pad tensors of the checkpoint."""
    reader: ReadAhead | None
    """The reader of the checkpoint's files, while they are read."""

    def together(self) -> AbstractContextManager[None]:
        """Context in which one rank may fail: afterwards all ranks go on, or all raise CommandError."""
        ...

    def weights_born_here(self, *, copy: bool) -> AbstractContextManager[None]:
        """Context in which SGLang builds the model and its parameters go into the weights range, with their values if
        `copy`."""
        ...

    def process_weights(self, model: torch.nn.Module) -> None:
        """Has SGLang process the weights that were read, for its kernels; what is made of them goes into the weights
        range. Called within `weights_born_here`."""
        ...

    def bind_weights(self, model: torch.nn.Module, *, copy: bool) -> None:
        """Moves the parameters that are elsewhere into the weights range, and reports where each lies. Called once."""
        ...

    def progress(self, step: str, done: int, total: int, unit: str = "bytes") -> None:
        """Reports `done` of `total` units of a step."""
        ...


class CheckpointLoader(DefaultModelLoader):  # type: ignore[misc]
    """Reads a checkpoint SGLang's own way, then checks that it set every value of every parameter.

    SGLang leaves a parameter that the checkpoint does not name as it was created, which is arbitrary memory. So all are
    marked before reading (`unset.py`), and what bears the mark afterwards was not in the checkpoint, or is NaN there.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        load_config.load_format = LoadFormat.AUTO
        super().__init__(load_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> torch.nn.Module:
        target: Target = current.model()
        target.paddings = _paddings(model_config.hf_config, target.ranks.rank, target.ranks.size)
        # SGLang draws a progress bar; this engine sends a message instead.
        born_here = target.weights_born_here(copy=True)
        together = target.together()
        ahead = _read_ahead(model_config.model_path)
        with together, blame(model_config.model_path), redirect_stderr(io.StringIO()), born_here, ahead:
            model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        _bind(model, model_config, copy=True)
        return model

    def _get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        total = _file_bytes(model_config.model_path, (_SAFE, ".bin", ".pt"))
        done = 0
        for name, tensor in super()._get_all_weights(model_config, model):
            yield name, tensor
            done += tensor.numel() * tensor.element_size()
            current.model().progress("reading checkpoint", min(done, total), total)

    @staticmethod
    def load_weights_and_postprocess(model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        instance: Target = current.model()
        expected = unset.mark(model)
        model.load_weights(weights)  # type: ignore[operator]
        unset.fill_unused(model)
        missing = {name: parameter for name, parameter in expected.items() if unset.is_marked(parameter)}
        if missing:
            shown = ", ".join(list(missing)[:_NAMES_SHOWN]) + (", ..." if len(missing) > _NAMES_SHOWN else "")
            # What is NaN in the files looks the same as what is not in them.
            either = ", or has NaN in them" if any(map(unset.has_nan, missing.values())) else ""
            raise BrokenModel(f"the checkpoint does not set {len(missing)} of the model's parameters{either}: {shown}")
        instance.process_weights(model)


class ImageLoader(DefaultModelLoader):  # type: ignore[misc]
    """Builds the model without reading weights: the weights range is filled from the loader's image.

    Quantised layers are laid out as after reading a checkpoint, with ones for weights: what is made of them has the
    places and shapes of the image's tensors. Scales of the KV cache are read, because SGLang keeps them as Python's
    numbers too.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        load_config.load_format = LoadFormat.AUTO
        super().__init__(load_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> torch.nn.Module:
        instance: Target = current.model()
        copy = model_config.quantization is not None  # what a checkpoint may lack keeps its values
        with instance.together(), blame(model_config.model_path), instance.weights_born_here(copy=copy):
            model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        _bind(model, model_config, copy=False)
        return model

    def _get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(()) if model_config.quantization is None else _kv_scales(Path(model_config.model_path))

    @staticmethod
    def load_weights_and_postprocess(model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        instance: Target = current.model()
        scales = dict(weights)
        if getattr(model, "quant_config", None) is not None:
            for parameter in unset.set_by_checkpoint(model).values():
                parameter.data.fill_(1)
        if scales:
            model.load_weights(iter(scales.items()))  # type: ignore[operator]
        post_processing.make(model)
        instance.process_weights(model)


def _kv_scales(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The scales of the KV cache in a checkpoint, by name; most have none."""
    for path in sorted(folder.glob(f"*{_SAFE}")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if name.endswith(_KV_SCALES):
                    yield name, file.get_tensor(name)


class RandomLoader(DefaultModelLoader):  # type: ignore[misc]
    """Builds the model with random weights in place of a checkpoint's."""

    def __init__(self, load_config: LoadConfig) -> None:
        load_config.load_format = LoadFormat.AUTO
        super().__init__(load_config)

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> torch.nn.Module:
        instance: Target = current.model()
        with instance.together(), blame(model_config.model_path), instance.weights_born_here(copy=True):
            model: torch.nn.Module = super().load_model(model_config=model_config, device_config=device_config)
        _bind(model, model_config, copy=True)
        return model

    def _get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        return checkpoint(model_config.model_path, model_config.dtype, next(model.parameters()).device)

    @staticmethod
    def load_weights_and_postprocess(model: torch.nn.Module, weights: Any, target_device: torch.device) -> None:
        instance: Target = current.model()
        model.load_weights(weights)  # type: ignore[operator]
        instance.process_weights(model)


def _bind(model: torch.nn.Module, model_config: ModelConfig, *, copy: bool) -> None:
    """Moves the model's tensors into the weights range. Tables of rotary embeddings first get the length that the
    model's context needs, in memory of their own. Raises BrokenModel, on all ranks, if they are made for fewer
    positions than the catalogue's context has."""
    instance: Target = current.model()
    context = instance.load.model.context_tokens
    made = min((len(table) for table in _rope_tables(model)), default=context)
    if made < context:
        # The rows that SGLang adds to tables are of another kind.
        raise BrokenModel(f"its context is {context} tokens by the catalogue, its rotary embedding is made for {made}")
    encoder.set_pooling(model, instance.load.model)
    reserve_rope_cache_for_long_sequences(model, model_config)
    _cut_rope_tables(model, model_config.context_len)
    instance.bind_weights(model, copy=copy)
    if copy:
        instance.progress("preparing the engine", 0, 0, "steps")


def _cut_rope_tables(model: torch.nn.Module, context_tokens: int) -> None:
    """Leaves out the rows of rotary embeddings' tables that SGLang would not reserve for a context of `context_tokens`.
    Tables are made for the longest context that the model knows: those of Gemma 4 31B take 805 MB. Only tables whose
    rows are positions from 0 on are cut, which are those that SGLang itself would lengthen."""
    align = envs.SGLANG_ROPE_CACHE_ALIGN.get()
    rows = -(-(context_tokens + envs.SGLANG_ROPE_CACHE_SAFETY_MARGIN.get()) // align) * align
    for module in model.modules():
        table = module._buffers.get("cos_sin_cache")
        by_position = hasattr(module, "_ensure_cos_sin_cache_length") and not getattr(module, "position_start", 0)
        if table is not None and by_position and len(table) > rows:
            module.cos_sin_cache = table[:rows].clone()


def _rope_tables(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tables of rotary embeddings, with a row for each position."""
    for module in model.modules():
        for name in ("cos_sin_cache", "long_cos_sin_cache"):
            if isinstance(table := getattr(module, name, None), torch.Tensor):
                yield table


def _paddings(config: Any, rank: int, ranks: int) -> set[int]:
    """Widths of padding in this rank's part of a layer, for which the checkpoint has nothing: SGLang widens layers of
    some models, so that they suit its kernels and divide among the ranks."""
    original = "original_"
    # Some wrappers have no shape of their own, only that of their text.
    config = config if hasattr(config, "num_attention_heads") else config.text_config
    # A wrapper whose text has heads of two sizes refuses to name one; its text names that of layers without a window.
    shape = config.text_config if getattr(config, "is_heterogeneous", False) else config
    head_dim = getattr(shape, "head_dim", None) or config.hidden_size // getattr(
        config, "original_num_attention_heads", config.num_attention_heads
    )
    widened = [
        (getattr(config, name), getattr(config, name[len(original) :]), head_dim if name.endswith("heads") else 1)
        for name in vars(config)
        if name.startswith(original) and hasattr(config, name[len(original) :])
    ]
    if hasattr(config, "original_total_num_kv_heads"):
        kv_heads = getattr(shape, "num_key_value_heads", config.num_attention_heads)  # encoders have as many
        widened.append((config.original_total_num_kv_heads, kv_heads, head_dim))
    parts = ((before, after // ranks, unit) for before, after, unit in widened)
    return {unit * min(part, max(0, (rank + 1) * part - before)) for before, part, unit in parts} - {0}


def _file_bytes(folder: str, suffixes: tuple[str, ...]) -> int:
    """Total bytes of the files in a folder with one of these suffixes."""
    names = [name for name in os.listdir(folder) if name.endswith(suffixes)]
    return sum(os.path.getsize(os.path.join(folder, name)) for name in names)


@contextmanager
def _read_ahead(folder: str) -> Iterator[None]:
    """Context in which SGLang gets the tensors of safetensors files from a `ReadAhead`, whose memory is made ready
    while SGLang builds the model."""
    instance: Target = current.model()
    began = time.monotonic()
    reader = instance.reader = _reader(folder, instance.options, instance.device)
    try:
        yield
        ahead, waited = (reader.nbytes, reader.waited_s) if reader is not None else (0, 0.0)
        seconds = time.monotonic() - began
        _log.info("checkpoint read", seconds=round(seconds, 3), ahead_bytes=ahead, waited_s=round(waited, 3))
    finally:
        instance.reader = None
        if reader is not None:
            reader.close()


def _reader(folder: str, options: Options, device: torch.device) -> ReadAhead | None:
    """The reader for a folder's safetensors files; None if there are none, with no `read_threads`, or without host
    memory for it."""
    nbytes = min(options.read_ahead_bytes, _file_bytes(folder, (_SAFE,)))
    if nbytes <= 0 or options.read_threads <= 0:
        return None
    try:
        return ReadAhead(HostBuffer(nbytes, device), options.read_threads)
    except OSError as error:
        _log.warning("files are read as they are needed", why=one_line(error))
        return None
