"""Places of a model's parameters in its weights range: placing, layout, manifest, checksum.

Parameters go there as SGLang creates them, one after the other, so that a model is never on the device twice. Tensors
that SGLang makes of them after reading a checkpoint (quantised layers) follow behind.

The unit is the storage, not the parameter: tied weights share one and are placed once, views and transposed parameters
keep their strides. Buffers that are not part of a checkpoint stay private, where SGLang made them, except for the
tables of rotary embeddings: they are constant, and large where the context is long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from protos import engine_pb2
from services.runtime.checksum import MULTIPLIER, ROW_BYTES, Checksum, as_text

ALIGN_BYTES = 256
_CHUNK_BYTES = 64 << 20
_TABLE = "cos_sin_cache"
"""SGLang's name for the tables of its rotary embeddings, which do not change."""
_MULTIPLIER = MULTIPLIER - (1 << 64)  # torch has signed words only, and the same bits come out


@dataclass(frozen=True)
class ParameterPlace:
    """One named tensor within a range; shape and stride are in elements."""

    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class WeightsLayout:
    """All tensors of a model in a range."""

    places: tuple[ParameterPlace, ...]
    nbytes: int
    """Bytes up to the end of the last tensor."""


class MappedWeights:
    """A weights range being filled from its start. `need(n)` maps its first n bytes, or raises NoMemory."""

    def __init__(self, memory: torch.Tensor, need: Callable[[int], None]) -> None:
        self.memory = memory
        self.used = 0
        self._need = need

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Byte of the range at which the tensor begins; None if it is somewhere else."""
        offset = int(tensor.data_ptr() - self.memory.data_ptr())
        return offset if 0 <= offset < self.memory.numel() and tensor.device == self.memory.device else None

    def take(self, storage: torch.UntypedStorage, copy: bool) -> int:
        """Takes a place for a storage, with its content if `copy`; returns the byte at which it starts. Raises
        NoMemory."""
        start = self.used
        end = start + storage.nbytes()
        self._need(end)
        self.used = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        if copy:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device)
            self.memory[start:end].copy_(source.set_(storage))
        return start

    def adopt(self, tensor: torch.Tensor, start: int) -> None:
        """Makes `tensor` a view of the range, where its storage now begins at byte `start`."""
        offset = start + int(tensor.storage_offset()) * tensor.element_size()
        tensor.data = view(
            self.memory, ParameterPlace("", offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
        )


@contextmanager
def born_in(range_: MappedWeights, *, copy: bool) -> Iterator[None]:
    """Context in which new parameters of modules go into the range at once, with their first values if `copy`. One that
    shares its storage with another stays where it is (`bind` moves both)."""
    register = torch.nn.Module.register_parameter

    def into_range(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device == range_.memory.device and _alone(parameter):
            if range_.offset(parameter) is None:
                range_.adopt(parameter, range_.take(parameter.untyped_storage(), copy))
        register(module, name, parameter)

    torch.nn.Module.register_parameter = into_range  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else holds the tensor's storage. (One count is the tensor's, one that of the object asked.)"""
    storage = tensor.untyped_storage()
    return storage.nbytes() > 0 and int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, every name of a shared tensor, in the model's own order."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def tables(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Constant buffers that a checkpoint does not hold, by name."""
    for prefix, module in model.named_modules():
        table = module._buffers.get(_TABLE)
        if table is not None and _TABLE in module._non_persistent_buffers_set:
            yield f"{prefix}.{_TABLE}", table


def bind(model: torch.nn.Module, range_: MappedWeights, *, copy: bool) -> None:
    """Moves those of the model's tensors that are not in the range behind those that are. With `copy` their values move
    along, without it they are whatever the range holds; tables keep their values, because nothing reads them from a
    checkpoint. Storages move one after the other, so that the second copy stays small. Raises NoMemory."""
    _move(checkpoint_tensors(model), range_, copy)
    _move(tables(model), range_, copy=True)


def _move(tensors: Iterator[tuple[str, torch.Tensor]], range_: MappedWeights, copy: bool) -> None:
    elsewhere: dict[int, list[torch.Tensor]] = {}
    for _, tensor in tensors:
        if tensor.untyped_storage().nbytes() and range_.offset(tensor) is None:
            elsewhere.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    for found in elsewhere.values():
        start = range_.take(found[0].untyped_storage(), copy)
        for tensor in found:
            if range_.offset(tensor) is None:  # the same tensor may have two names
                range_.adopt(tensor, start)


def lay_out(model: torch.nn.Module, range_: MappedWeights) -> WeightsLayout:
    """Layout of a model that is bound: the same in every process that builds the same model."""
    places = []
    for name, tensor in chain(checkpoint_tensors(model), tables(model)):
        offset = range_.offset(tensor)
        if offset is not None and tensor.untyped_storage().nbytes():
            places.append(ParameterPlace(name, offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype))
    return WeightsLayout(tuple(places), range_.used)


def view(memory: torch.Tensor, place: ParameterPlace) -> torch.Tensor:
    """The tensor at `place`, a view of `memory` (bytes)."""
    start = place.offset_bytes
    item = place.dtype.itemsize
    reach = 1 + sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
    flat = memory[start : start + max(reach, 0) * item].view(place.dtype)
    return flat.as_strided(place.shape, place.stride)


def python_scalars(model: torch.nn.Module) -> dict[str, str]:
    """Numbers that quantised layers keep outside their tensors (scales of the KV cache), as text by name."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name in ("k_scale_float", "v_scale_float"):
            value = getattr(module, name, None)
            if value is not None:
                found[f"{prefix}.{name}"] = repr(float(value))
    return found


def manifest(layout: WeightsLayout, total_bytes: int, scalars: dict[str, str]) -> engine_pb2.Manifest:
    """Message with the layout, for the loader. `total_bytes`: bytes of the range, whole extents."""
    return engine_pb2.Manifest(
        tensors=[
            engine_pb2.Manifest.Tensor(
                name=place.name,
                offset_bytes=place.offset_bytes,
                shape=place.shape,
                stride=place.stride,
                dtype=str(place.dtype).removeprefix("torch."),
            )
            for place in layout.places
        ],
        total_bytes=total_bytes,
        scalars=scalars,
    )


def checksum(memory: torch.Tensor) -> str:
    """Checksum of all bytes of a weights range, as the loader computes it for an image (`services.runtime.checksum`).
    On a GPU it is one pass at the speed of its memory."""
    if memory.device.type == "cpu":
        whole = Checksum()
        for start in range(0, memory.numel(), _CHUNK_BYTES):
            whole.add(start, memory[start : start + _CHUNK_BYTES].numpy())
        return whole.text()
    rows = memory.view(torch.int64).view(-1, ROW_BYTES // 8).sum(dim=1)
    factors = torch.arange(1, 2 * len(rows), 2, dtype=torch.int64, device=memory.device) * _MULTIPLIER
    return as_text(int((rows * factors).sum()))
