"""Layout and binding of parameters in a weights range, with plain torch modules."""

from __future__ import annotations

import pytest
import torch

from gpu_scheduler.engines.sglang.base.errors import BrokenModel
from gpu_scheduler.engines.sglang.weights import weights_range
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


def empty_range() -> weights_range.MappedWeights:
    return weights_range.MappedWeights(torch.zeros(4096, dtype=torch.uint8), lambda nbytes: None)


def bound(model: torch.nn.Module, copy: bool = True) -> tuple[weights_range.WeightsLayout, torch.Tensor]:
    range_ = empty_range()
    weights_range.bind(model, range_, copy=copy)
    return weights_range.lay_out(model, range_), range_.memory


def within(tensor: torch.Tensor, memory: torch.Tensor) -> bool:
    start = memory.data_ptr()
    return start <= tensor.data_ptr() < start + memory.numel()


def test_binding_moves_every_checkpoint_tensor_and_keeps_values_shapes_and_strides() -> None:
    model, untouched = Small(), Small()
    _, memory = bound(model)
    for (name, tensor), (_, before) in zip(
        weights_range.checkpoint_tensors(model), weights_range.checkpoint_tensors(untouched), strict=True
    ):
        assert within(tensor, memory), name
        assert torch.equal(tensor, before) and tensor.stride() == before.stride(), name
    assert not within(model.table, memory)


class Rotary(torch.nn.Module):
    """As SGLang's: one for all layers, with a table that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.arange(32.0).view(8, 4), persistent=False)


def test_tables_of_rotary_embeddings_leave_with_the_weights() -> None:
    model, rotary = Small(), Rotary()
    model.first, model.second = rotary, rotary
    layout, memory = bound(model, copy=False)  # also where an image will fill the range
    assert within(rotary.cos_sin_cache, memory) and torch.equal(rotary.cos_sin_cache, Rotary().cos_sin_cache)
    assert [place.name for place in layout.places if "cos_sin" in place.name] == ["first.cos_sin_cache"]
    assert "first.cos_sin_cache" not in dict(weights_range.checkpoint_tensors(model))


def test_rotary_tables_keep_their_values_where_an_image_fills_the_range_later() -> None:
    """SGLang extends and converts them before that."""
    model, rotary = Small(), Rotary()
    model.first = rotary
    _, memory = bound(model, copy=False)
    assert within(rotary.cos_sin_cache, memory) and torch.equal(rotary.cos_sin_cache, Rotary().cos_sin_cache)
    assert not model.embed.weight.any()


def test_tied_weights_are_laid_out_once_and_stay_tied() -> None:
    model = Small()
    layout, _ = bound(model)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    places = {place.name: place for place in layout.places}
    assert places["head.weight"].offset_bytes == places["embed.weight"].offset_bytes
    assert places["lower"].offset_bytes == places["upper"].offset_bytes + 3 * 5 * 4
    assert len({place.offset_bytes for place in layout.places}) == 5
    assert layout.nbytes == 4 * weights_range.ALIGN_BYTES


def test_parameters_go_into_the_range_as_they_are_made_and_shared_ones_follow() -> None:
    needed: list[int] = []
    range_ = weights_range.MappedWeights(torch.zeros(4096, dtype=torch.uint8), needed.append)
    with weights_range.born_in(range_, copy=True):
        model = Small()
    assert within(model.embed.weight, range_.memory) and within(model.turned, range_.memory)
    assert not within(model.upper, range_.memory) and not within(model.kept, range_.memory)
    assert needed == sorted(needed) and needed[-1] <= range_.used
    weights_range.bind(model, range_, copy=True)
    layout, untouched = weights_range.lay_out(model, range_), Small()
    for (name, tensor), (_, before) in zip(
        weights_range.checkpoint_tensors(model), weights_range.checkpoint_tensors(untouched), strict=True
    ):
        assert within(tensor, range_.memory) and torch.equal(tensor, before), name
    places = {place.name: place for place in layout.places}
    assert places["lower"].offset_bytes == places["upper"].offset_bytes + 3 * 5 * 4
    assert model.head.weight is model.embed.weight
    assert torch.nn.Linear(2, 2).weight.untyped_storage().nbytes() == 16  # outside everything is as ever


def test_weights_range_of_another_process_has_the_same_manifest_and_takes_the_image() -> None:
    first, second = Small(seed=1), Small(seed=2)
    layout, image = bound(first)
    other, memory = bound(second, copy=False)
    as_bytes = [
        weights_range.manifest(each, 4096, {}).SerializeToString(deterministic=True) for each in (layout, other)
    ]
    assert as_bytes[0] == as_bytes[1]
    memory.copy_(image)
    assert weights_range.checksum(memory) == weights_range.checksum(image)
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(
            weights_range.checkpoint_tensors(first), weights_range.checkpoint_tensors(second), strict=True
        )
    )


def test_tensors_move_down_over_what_is_used_no_more_and_keep_values_strides_and_ties() -> None:
    model, untouched, range_ = Small(), Small(), empty_range()
    weights_range.bind(model, range_, copy=True)
    assert not weights_range.close_gaps(model, range_), "there is no gap"
    range_.others["beside"] = range_.memory[range_.used : range_.used + 6].view(torch.int16).fill_(7)
    range_.take(torch.empty(6, dtype=torch.uint8).untyped_storage(), copy=False)
    del model.turned, untouched.turned
    before = range_.used
    assert weights_range.close_gaps(model, range_)
    assert range_.used == before - weights_range.ALIGN_BYTES
    for (name, tensor), (_, expected) in zip(
        weights_range.checkpoint_tensors(model), weights_range.checkpoint_tensors(untouched), strict=True
    ):
        assert within(tensor, range_.memory) and torch.equal(tensor, expected), name
        assert tensor.stride() == expected.stride(), name
    assert model.head.weight is model.embed.weight
    assert range_.others["beside"].tolist() == [7, 7, 7]
    places = {place.name: place.offset_bytes for place in weights_range.lay_out(model, range_).places}
    assert places["lower"] == places["upper"] + 3 * 5 * 4
    assert sorted({places[name] for name in places if name != "lower"}) == [0, 256, 512, 768]
    assert not weights_range.close_gaps(model, range_), "the gap is closed"


@pytest.mark.parametrize("chunk", [100, 256, 1 << 20])
def test_a_tensor_longer_than_the_gap_before_it_moves_over_its_own_bytes(chunk: int) -> None:
    range_, model = empty_range(), torch.nn.Module()
    model.short = torch.nn.Parameter(torch.ones(60))
    model.long = torch.nn.Parameter(torch.arange(300.0))
    model.last = torch.nn.Parameter(torch.arange(3.0))
    weights_range.bind(model, range_, copy=True)
    del model.short
    assert weights_range.close_gaps(model, range_, chunk_bytes=chunk)
    assert torch.equal(model.long, torch.arange(300.0)) and torch.equal(model.last, torch.arange(3.0))
    assert (range_.offset(model.long), range_.offset(model.last), range_.used) == (0, 1280, 1536)


def test_a_model_without_tensors_leaves_an_empty_range() -> None:
    range_ = empty_range()
    range_.take(torch.empty(6, dtype=torch.uint8).untyped_storage(), copy=False)
    assert weights_range.close_gaps(torch.nn.Module(), range_) and range_.used == 0


def test_gaps_are_not_closed_under_a_tensor_that_is_kept_outside_of_the_model() -> None:
    model, range_ = Small(), empty_range()
    weights_range.bind(model, range_, copy=True)
    kept = {"view": model.upper.data[1:]}
    del model.embed, model.head
    with pytest.raises(BrokenModel, match=r"a tensor \[2, 5\] of torch.float32 over the weights .* \(held by dict\)"):
        weights_range.close_gaps(model, range_)
    assert torch.equal(kept["view"], model.upper[1:])


def test_a_changed_byte_changes_the_checksum() -> None:
    _, memory = bound(Small())
    before = weights_range.checksum(memory)
    memory[17] ^= 1
    assert weights_range.checksum(memory) != before and before.startswith("rows:")


def test_the_manifest_names_offsets_strides_and_types() -> None:
    layout, _ = bound(Small())
    manifest = engine_pb2.Manifest.FromString(weights_range.manifest(layout, 8192, {"a": "1.5"}).SerializeToString())
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    assert list(tensors["turned"].shape) == [4, 3] and list(tensors["turned"].stride) == [1, 4]
    assert tensors["kept"].dtype == "float16" and "table" not in tensors
    assert manifest.total_bytes == 8192 and dict(manifest.scalars) == {"a": "1.5"}
    assert all(tensor.offset_bytes % 4 == 0 for tensor in manifest.tensors)


def test_view_that_is_adopted_keeps_no_memory_elsewhere() -> None:
    """torch keeps the tensor of which a view was made, as long as the view lives."""
    range_ = empty_range()
    turned = torch.arange(12.0).view(3, 4).t()
    range_.adopt(turned, range_.take(turned.untyped_storage(), copy=True))
    assert within(turned, range_.memory) and turned.tolist() == torch.arange(12.0).view(3, 4).t().tolist()
    assert turned._base is not None and within(turned._base, range_.memory)
