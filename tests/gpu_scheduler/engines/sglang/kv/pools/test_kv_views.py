"""Keys and values of a token lie together in a range of bytes, and kernels find them there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape, heads_of_states, kv_views, state_views
from tests.gpu_scheduler.engines.sglang.forks import Imported

LAYERS, HEADS, DIM, PAGES = 3, 2, 4, 5


@pytest.fixture(params=[1, 3, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def shape_of(page_size: int, v_dim: int = DIM, dtype: torch.dtype = torch.float32) -> KvShape:
    return KvShape(LAYERS, HEADS, DIM, v_dim, page_size, PAGES, dtype)


def raw_of(shape: KvShape) -> torch.Tensor:
    return torch.zeros(shape.pages * shape.page_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("v_dim", [DIM, 7, 0])
def test_views_share_no_element_and_leave_none_out(page_size: int, v_dim: int) -> None:
    shape = shape_of(page_size, v_dim)
    raw = raw_of(shape)
    views = [view for both in kv_views(raw, shape) for view in both]
    for number, view in enumerate(views, start=1):
        assert torch.count_nonzero(view) == 0, "somebody else's"
        view.fill_(number)
    assert torch.count_nonzero(raw.view(torch.float32)) == raw.numel() // 4
    assert [view.shape for view in views] == [
        (PAGES * page_size, HEADS, dim) for dim in (DIM, v_dim) for _ in range(LAYERS)
    ]


def test_a_page_is_the_same_bytes_in_all_layers(page_size: int) -> None:
    """A page that is one range of bytes can be mapped, moved and copied by itself."""
    shape = shape_of(page_size)
    raw = raw_of(shape)
    for both in kv_views(raw, shape):
        for view in both:
            view[2 * page_size : 3 * page_size] = 1.0
    written = raw.view(PAGES, -1).ne(0).any(dim=1)
    assert written.tolist() == [page == 2 for page in range(PAGES)]


def test_elements_of_a_head_and_heads_of_a_token_lie_in_a_row(page_size: int) -> None:
    """Kernels of attention, and kernels that store a row, want rows in one piece."""
    for dtype in (torch.bfloat16, torch.uint8):
        shape = shape_of(page_size, dtype=dtype)
        for both in kv_views(raw_of(shape), shape):
            assert all(view.stride() == (shape.token_elements, DIM, 1) for view in both)


def test_states_lie_one_after_the_other_with_their_parts_layer_by_layer() -> None:
    stride, states, parts = 256, 4, [((3, 2), torch.bfloat16), ((6, 1), torch.bfloat16), ((2, 4), torch.float32)]
    raw = torch.zeros(states * stride, dtype=torch.uint8)
    views = state_views(raw, LAYERS, stride, parts)
    assert [view.shape for view in views] == [(LAYERS, states, *shape) for shape, _ in parts]
    begin = 2 * stride
    for view in views:
        for layer in range(LAYERS):
            # In one piece and in the order of its dimensions, as kernels want it.
            assert view[layer, 2].is_contiguous()
            size = view[layer, 2].numel() * view.itemsize
            assert not raw.any()
            view[layer, 2] = 1
            assert raw[begin : begin + size].any() and raw.count_nonzero() == raw[begin : begin + size].count_nonzero()
            view[layer, 2] = 0
            begin += size


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.integers(1, 3))
def test_heads_of_a_state_are_entries_of_one_contiguous_tensor(heads: int, layers: int, more: int, conv: int) -> None:
    rows, columns, slots = 2, 3, 4
    of_head = rows * columns * 4
    # What lies before the states, and what is left behind them, is a whole number of heads, or not.
    stride = (layers * heads + more) * of_head + -(-layers * conv * 4 // of_head) * of_head
    raw = torch.arange(slots * stride, dtype=torch.int32).to(torch.uint8)
    _, temporal = state_views(raw, layers, stride, [((conv,), torch.float32), ((heads, rows, columns), torch.float32)])
    for layer in temporal:
        entries, step = heads_of_states(layer)
        assert entries.is_contiguous()
        for slot in range(slots):
            first = slot * step
            assert torch.equal(entries[first : first + heads, 0].view(torch.uint8), layer[slot].view(torch.uint8))
            assert entries[first].data_ptr() == layer[slot].data_ptr()


def test_states_that_are_no_whole_number_of_heads_apart_are_refused() -> None:
    states = torch.zeros(64).as_strided((2, 1, 2, 3), (7, 6, 3, 1))
    with pytest.raises(ValueError, match="not rows of whole heads"):
        heads_of_states(states)


def test_part_of_a_state_that_would_begin_inside_a_number_is_refused() -> None:
    parts = [((3,), torch.bfloat16), ((2,), torch.float32)]
    with pytest.raises(ValueError, match="begins at byte 6 of 64"):
        state_views(torch.zeros(64, dtype=torch.uint8), 1, 64, parts)


POOL = """
import torch
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from gpu_scheduler.engines.sglang.kv.pools import pool as ours
from gpu_scheduler.engines.sglang.kv.pools.kv_views import KvShape, kv_views

LAYERS, HEADS, K_DIM, PAGES, PAGE_SIZE = 2, 3, 4, 5, 8
assert ours.ElasticPool._store_kv_layer is MHATokenToKVPool._store_kv_layer

for v_dim in (K_DIM, 7):
    shape = KvShape(LAYERS, HEADS, K_DIM, v_dim, PAGE_SIZE, PAGES, torch.bfloat16)
    raw = torch.zeros(shape.pages * shape.page_bytes, dtype=torch.uint8)
    pool = object.__new__(ours.ElasticPool)
    pool.size, pool.page_size, pool.store_dtype = (PAGES - 1) * PAGE_SIZE, PAGE_SIZE, torch.bfloat16
    pool.row_dim, pool.v_row_dim = HEADS * K_DIM, HEADS * v_dim
    pool.kv_cache_layout, pool.device_module, pool.alt_stream = "layer_major", None, None
    pool.k_buffer, pool.v_buffer = kv_views(raw, shape)
    loc = torch.randperm(PAGES * PAGE_SIZE)
    for layer in range(LAYERS):
        k = torch.rand(len(loc), HEADS, K_DIM).to(torch.bfloat16)
        v = torch.rand(len(loc), HEADS, v_dim).to(torch.bfloat16)
        pool._store_kv_layer(layer, loc, k, v)
        for buffer, said, dim in ((pool.k_buffer[layer], k, K_DIM), (pool.v_buffer[layer], v, v_dim)):
            # Kernels that store a row on a GPU take this view, which has to copy nothing.
            assert buffer.view(len(buffer), -1).data_ptr() == buffer.data_ptr()
            read = paged_kv_view(buffer, PAGE_SIZE, HEADS, dim)
            assert read.shape == (PAGES, PAGE_SIZE, HEADS, dim)
            assert read.data_ptr() == buffer.data_ptr()
            assert torch.equal(read[loc // PAGE_SIZE, loc % PAGE_SIZE], said)
"""


@pytest.mark.sglang
def test_what_sglangs_pool_stores_into_our_views_its_attention_reads(imported: Imported) -> None:
    imported.run(POOL)


IN_SLOTS = """
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel

from gpu_scheduler.engines.sglang.hooks.memory import states_in_slots


def backend(*layers):
    kernel = object.__new__(TritonGDNKernel)
    kernel.extend = lambda **given: given
    pool = SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(temporal=layers)))
    dispatcher = SimpleNamespace(extend_kernel=kernel)
    made = SimpleNamespace(
        requires_contiguous_prefill_state=True, kernel_dispatcher=dispatcher, req_to_token_pool=pool,
        forward_metadata=object(),
    )
    states_in_slots(None, made, None)
    return made


both = torch.randn(5, 4, 2, 3)  # as far apart as two layers
layers = both[:, :2], both[:, 2:]
made = backend(*layers)
assert not made.requires_contiguous_prefill_state, "or SGLang copies them before"


def check(slots):
    for number in (0, 1, 0):
        states = both[:, 2 * number : 2 * number + 2]  # SGLang makes a view for each step, too
        given = made.kernel_dispatcher.extend_kernel.extend(ssm_states=states, cache_indices=slots)
        entries, first = given["ssm_states"], given["cache_indices"]
        assert entries.is_contiguous() and first.dtype == torch.int32 and len(first) == len(slots)
        for slot, at in zip(slots.tolist(), first.tolist(), strict=True):
            assert torch.equal(entries[at : at + 2, 0], layers[number][slot])


slots = torch.tensor([3, 0], dtype=torch.int32)
check(slots)
check(torch.tensor([1, 2, 4], dtype=torch.int32))
slots[:] = torch.tensor([2, 1])  # the next step may have other slots in the same tensor
made.forward_metadata = object()
check(slots)

uneven = torch.zeros(64).as_strided((4, 1, 2, 3), (7, 6, 3, 1))
assert backend(uneven).requires_contiguous_prefill_state, "SGLang copies what is no whole number of heads apart"
"""


def test_kernels_of_prompts_are_given_the_states_in_their_slots_where_they_can_be(imported: Imported) -> None:
    imported.run(IN_SLOTS)
