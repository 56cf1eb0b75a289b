"""Places of a model's parameters in its weights range: placing, layout, manifest, checksum.

Parameters go there as SGLang creates them, one after the other, so that a model is never on the device twice. What
SGLang makes of them after reading a checkpoint (quantised layers) takes the places of what it replaces
(`post_processing.py`), and at last all tensors move down, so that none lies behind a gap.

The unit is the storage, not the parameter: tied weights share one and are placed once, views and transposed parameters
keep their strides. Buffers that are not part of a checkpoint stay private, where SGLang made them, except for the
tables of rotary embeddings: they are constant, and large where the context is long.
"""

from __future__ import annotations

import gc
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch

from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.policy.tensor_spans import Places, Span, moved_down, overlapping
from protos import engine_pb2
from services.runtime.checksum import MULTIPLIER, ROW_BYTES, Checksum, as_text

ALIGN_BYTES = 256
_CHUNK_BYTES = 64 << 20
"""Bytes of weights that are moved, or summed up, at once."""
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
        self.places = Places(ALIGN_BYTES)
        self.others: dict[str, torch.Tensor] = {}
        """Tensors beside parameters and buffers that belong to the weights, by name."""
        self.born: list[tuple[weakref.ref[torch.nn.Parameter], Span]] = []
        """Parameters for which `born_in` took a place, with their places; some are gone again."""
        self._need = need

    @property
    def used(self) -> int:
        """Byte behind the last place that is taken."""
        return self.places.used

    def offset(self, tensor: torch.Tensor) -> int | None:
        """Byte of the range at which the tensor begins; None if it is somewhere else."""
        offset = int(tensor.data_ptr() - self.memory.data_ptr())
        return offset if 0 <= offset < self.memory.numel() and tensor.device == self.memory.device else None

    def take(self, storage: torch.UntypedStorage, copy: bool) -> int:
        """Takes a place for a storage, with its content if `copy`; returns the byte at which it starts. Raises
        NoMemory."""
        start = self.places.take(storage.nbytes())
        end = start + storage.nbytes()
        self._need(end)
        if copy:
            source = torch.empty(0, dtype=torch.uint8, device=storage.device)
            self.memory[start:end].copy_(source.set_(storage))
        return start

    def span(self, tensor: torch.Tensor) -> Span | None:
        """The bytes of the range from the tensor's first element to its last; None if it lies somewhere else."""
        offset = self.offset(tensor)
        if offset is None or not tensor.numel():
            return None
        return offset, offset + _reach(tensor.shape, tensor.stride()) * tensor.element_size()

    def adopt(self, tensor: torch.Tensor, start: int) -> None:
        """Makes `tensor` a view of the range, where its storage now begins at byte `start`. A view keeps the tensor
        that it was made of, and with it the old storage: that one becomes a view of the range as well."""
        base = tensor._base
        if base is not None and base.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
            base = None
        for each in (tensor, base):
            if each is not None:
                offset = start + int(each.storage_offset()) * each.element_size()
                place = ParameterPlace("", offset, tuple(each.shape), tuple(each.stride()), each.dtype)
                each.data = view(self.memory, place)


@contextmanager
def born_in(range_: MappedWeights, *, copy: bool) -> Iterator[None]:
    """Context in which new parameters of modules go into the range at once, with their first values if `copy`. One that
    shares its storage with another stays where it is (`bind` moves both)."""
    register = torch.nn.Module.register_parameter

    def into_range(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device == range_.memory.device and _alone(parameter):
            if range_.offset(parameter) is None:
                nbytes = parameter.untyped_storage().nbytes()
                start = range_.take(parameter.untyped_storage(), copy)
                range_.adopt(parameter, start)
                range_.born.append((weakref.ref(parameter), (start, start + nbytes)))
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
    _move(iter(range_.others.items()), range_, copy)


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
    for name, tensor in _held(model, range_):
        offset = range_.offset(tensor)
        if offset is not None and tensor.untyped_storage().nbytes():
            places.append(ParameterPlace(name, offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype))
    return WeightsLayout(tuple(places), range_.used)


def close_gaps(model: torch.nn.Module, range_: MappedWeights, *, chunk_bytes: int = _CHUNK_BYTES) -> bool:
    """Moves the tensors of a model that is bound down to the start of the range, in their order, over places that
    nothing uses any more, at most `chunk_bytes` at once; returns whether the range became shorter. Raises BrokenModel
    if SGLang holds a tensor over the range that was not found in the model: it points to the bytes of another one, or
    would do so."""
    tensors = [tensor for _, tensor in _held(model, range_)]
    spans = [span for tensor in tensors if (span := range_.span(tensor)) is not None]
    whole = overlapping(spans)
    starts = moved_down(whole, ALIGN_BYTES)
    end = starts[-1] + whole[-1][1] - whole[-1][0] if whole else 0
    shorter = end + ALIGN_BYTES <= range_.used
    if shorter or range_.places.released:
        _check_known(tensors, range_)
    if not shorter:
        return False
    for (first, last), start in zip(whole, starts, strict=True):
        _move_bytes(range_.memory, first, last, start, chunk_bytes)
    begins = [first for first, _ in whole]
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        offset = range_.offset(tensor)
        if offset is not None and tensor.numel():
            number = bisect_right(begins, offset) - 1
            moved = offset - begins[number] + starts[number]
            tensor.data = view(
                range_.memory, ParameterPlace("", moved, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
            )
    range_.places.restart(end)
    return True


def _move_bytes(memory: torch.Tensor, first: int, last: int, start: int, chunk_bytes: int) -> None:
    """Moves bytes down, a chunk at a time, so that a second copy stays small."""
    for done in range(0, last - first if start != first else 0, chunk_bytes):
        size = min(last - first - done, chunk_bytes)
        source = memory[first + done : first + done + size]
        overlaps = size > first - start
        memory[start + done : start + done + size].copy_(source.clone() if overlaps else source)


def _check_known(tensors: list[torch.Tensor], range_: MappedWeights) -> None:
    known = {id(tensor) for tensor in tensors} | {id(range_.memory)}
    if _unknown(known, range_):
        gc.collect()  # modules that SGLang made and replaced refer to themselves
    # A view holds the tensor that it is a view of, out of Python's sight. Nothing reads that of a known view unless an
    # object has it as well; of an unknown one the view is what leads somewhere.
    bases = {id(tensor._base) for tensor in tensors if tensor._base is not None}
    unknown = [each for each in _unknown(known, range_) if id(each) not in bases or _holders(each)]
    for found in sorted(unknown, key=lambda each: not _holders(each))[:1]:
        raise BrokenModel(
            f"SGLang keeps a tensor {list(found.shape)} of {found.dtype} over the weights where it cannot be found"
            f" (held by {', '.join(_holders(found)) or 'nothing'}): this kind of model is not supported"
        )


def _holders(tensor: torch.Tensor) -> list[str]:
    """Types of the objects that refer to a tensor; lists and frames are this check's own."""
    return sorted({type(each).__qualname__ for each in gc.get_referrers(tensor)} - {"list", "frame"})


def _unknown(known: set[int], range_: MappedWeights) -> list[torch.Tensor]:
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and id(each) not in known and range_.span(each) is not None
    ]


def _held(model: torch.nn.Module, range_: MappedWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model that belong to its weights, by name, every name of a shared tensor."""
    return chain(checkpoint_tensors(model), tables(model), range_.others.items())


def view(memory: torch.Tensor, place: ParameterPlace) -> torch.Tensor:
    """The tensor at `place`, a view of `memory` (bytes)."""
    start = place.offset_bytes
    item = place.dtype.itemsize
    reach = _reach(place.shape, place.stride)
    flat = memory[start : start + reach * item].view(place.dtype)
    return flat.as_strided(place.shape, place.stride)


def _reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor; 0 if it has none."""
    return max(0, 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))


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
