"""Layout and binding of parameters in a weights range, with plain torch modules."""

from __future__ import annotations

import torch

from gpu_scheduler.engines.sglang import weights
from protos import engine_pb2


class Small(torch.nn.Module):
    """Tied, transposed, sliced and persistent tensors, and one buffer that no checkpoint has."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.turned = torch.nn.Parameter(torch.empty(3, 4).t())
        both = torch.empty(6, 5)
        self.upper, self.lower = torch.nn.Parameter(both[:3]), torch.nn.Parameter(both[3:])
        self.register_buffer("kept", torch.empty(3, dtype=torch.float16))
        self.register_buffer("table", torch.ones(4), persistent=False)
        for tensor in (self.embed.weight, self.turned, self.upper, self.lower, self.kept):
            tensor.data.copy_(torch.rand(tensor.shape, generator=generator))


def bound(model: torch.nn.Module, copy: bool = True) -> tuple[weights.Layout, torch.Tensor]:
    layout = weights.lay_out(model)
    memory = torch.zeros(layout.nbytes + 1000, dtype=torch.uint8)
    weights.bind(model, layout, memory, copy=copy)
    return layout, memory


def within(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    start = memory.data_ptr()
    return start <= tensor.data_ptr() < start + memory.numel()


def test_binding_moves_every_checkpoint_tensor_and_keeps_values_shapes_and_strides() -> None:
    model, untouched = Small(), Small()
    _, memory = bound(model)
    for (name, tensor), (_, before) in zip(
        weights.checkpoint_tensors(model), weights.checkpoint_tensors(untouched), strict=True
    ):
        assert within(tensor, memory), name
        assert torch.equal(tensor, before) and tensor.stride() == before.stride(), name
    assert not within(model.table, memory)


def test_tied_weights_are_laid_out_once_and_stay_tied() -> None:
    model = Small()
    layout, _ = bound(model)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    places = {place.name: place for place in layout.places}
    assert places["head.weight"].offset_bytes == places["embed.weight"].offset_bytes
    assert places["lower"].offset_bytes == places["upper"].offset_bytes + 3 * 5 * 4
    assert len(layout.storages) == 4


def test_another_process_makes_the_same_manifest_and_takes_the_image() -> None:
    first, second = Small(seed=1), Small(seed=2)
    layout, image = bound(first)
    other, memory = bound(second, copy=False)
    as_bytes = [weights.manifest(each, 4096, {}).SerializeToString(deterministic=True) for each in (layout, other)]
    assert as_bytes[0] == as_bytes[1]
    memory.copy_(image)
    assert weights.checksum(memory) == weights.checksum(image)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(weights.checkpoint_tensors(first), weights.checkpoint_tensors(second), strict=True)
    )


def test_a_changed_byte_changes_the_checksum() -> None:
    _, memory = bound(Small())
    before = weights.checksum(memory)
    memory[17] ^= 1
    assert weights.checksum(memory) != before and before.startswith("crc32:")


def test_the_manifest_names_offsets_strides_and_types() -> None:
    layout, _ = bound(Small())
    manifest = engine_pb2.Manifest.FromString(weights.manifest(layout, 8192, {"a": "1.5"}).SerializeToString())
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    assert list(tensors["turned"].shape) == [4, 3] and list(tensors["turned"].stride) == [1, 4]
    assert tensors["kept"].dtype == "float16" and "table" not in tensors
    assert manifest.total_bytes == 8192 and dict(manifest.scalars) == {"a": "1.5"}
    assert all(tensor.offset_bytes % 4 == 0 for tensor in manifest.tensors)
