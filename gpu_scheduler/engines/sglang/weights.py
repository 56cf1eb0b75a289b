"""Where a model's parameters lie in its weights range: layout, manifest, binding, checksum.

The unit of layout is the storage, not the parameter: tied weights share one and are laid out once, views and
transposed parameters keep their strides. Buffers that are not part of a checkpoint (rotary tables, ...) stay
private, where SGLang made them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from protos import engine_pb2

ALIGN_BYTES = 256
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class Place:
    """One named tensor within a range."""

    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Layout:
    """All tensors of a model in a range. `storages` maps a storage's address to its offset."""

    places: tuple[Place, ...]
    storages: dict[int, int]
    nbytes: int


def checkpoint_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers by name, every name of a shared tensor, in the model's own order."""
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def lay_out(model: torch.nn.Module) -> Layout:
    """Places every storage once, in order of first appearance: the same for every process that builds the same
    model."""
    places: list[Place] = []
    storages: dict[int, int] = {}
    end = 0
    for name, tensor in checkpoint_tensors(model):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue
        base = storages.get(storage.data_ptr())
        if base is None:
            base = storages[storage.data_ptr()] = end
            end += -(-storage.nbytes() // ALIGN_BYTES) * ALIGN_BYTES
        offset = base + int(tensor.storage_offset()) * tensor.element_size()
        places.append(Place(name, offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype))
    return Layout(tuple(places), storages, end)


def bind(model: torch.nn.Module, layout: Layout, memory: torch.Tensor, *, copy: bool) -> None:
    """Moves the model's tensors into `memory` (bytes): from now on its parameters are views of it. With `copy`
    their values move along, without it they are whatever `memory` holds. One storage after the other, so that the
    second copy stays small."""
    by_name = {place.name: place for place in layout.places}
    sharing: dict[int, list[tuple[torch.Tensor, Place]]] = {}
    for name, tensor in checkpoint_tensors(model):
        if name in by_name:
            sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append((tensor, by_name[name]))
    for address, tensors in sharing.items():
        if copy:
            storage = tensors[0][0].untyped_storage()
            source = torch.empty(0, dtype=torch.uint8, device=tensors[0][0].device)
            source.set_(storage)
            start = layout.storages[address]
            memory[start : start + storage.nbytes()].copy_(source)
            del source, storage
        for tensor, place in tensors:
            tensor.data = view(memory, place)


def view(memory: torch.Tensor, place: Place) -> torch.Tensor:
    """The tensor at `place`."""
    start = place.offset_bytes
    item = place.dtype.itemsize
    reach = 1 + sum((size - 1) * step for size, step in zip(place.shape, place.stride, strict=True))
    flat = memory[start : start + max(reach, 0) * item].view(place.dtype)
    return flat.as_strided(place.shape, place.stride)


def python_scalars(model: torch.nn.Module) -> dict[str, str]:
    """Numbers that quantised layers keep outside their tensors (scales of the KV cache)."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name in ("k_scale_float", "v_scale_float"):
            value = getattr(module, name, None)
            if value is not None:
                found[f"{prefix}.{name}"] = repr(float(value))
    return found


def manifest(layout: Layout, total_bytes: int, scalars: dict[str, str]) -> engine_pb2.Manifest:
    """`total_bytes`: of the range, whole extents."""
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
    """Over all bytes of a weights range: crc32 on the host, on a GPU sums of 64-bit words that its memory's own
    bandwidth bounds (8B: about 20 ms)."""
    if memory.device.type == "cpu":
        crc = 0
        for start in range(0, memory.numel(), _CHUNK_BYTES):
            crc = zlib.crc32(memory[start : start + _CHUNK_BYTES].numpy().data, crc)
        return f"crc32:{crc:08x}"
    # Each chunk's words weighted by odd numbers, so that words that changed places show; the chunks' sums in order.
    words = memory.view(torch.int64)
    length = _CHUNK_BYTES // 8
    weights = torch.arange(length, dtype=torch.int64, device=memory.device).mul_(-0x61C8864680B583EB).bitwise_or_(1)
    sums = torch.stack([(part * weights[: len(part)]).sum() for part in words.split(length)])
    return f"words:{zlib.crc32(sums.cpu().numpy().tobytes()):08x}"
