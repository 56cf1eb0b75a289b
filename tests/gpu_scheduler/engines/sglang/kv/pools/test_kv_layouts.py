"""Where the keys and values of a token lie in each layout."""

from __future__ import annotations

import pytest
import torch

from gpu_scheduler.engines.sglang.kv.pools.kv_layouts import KvShape, PageMajor, RangeLayout, Rows, TokenMajor
from tests.gpu_scheduler.engines.sglang.forks import Imported

LAYERS, HEADS, DIM, PAGES = 3, 2, 4, 5
LAYOUTS = [TokenMajor(), PageMajor()]


@pytest.fixture(params=[1, 3, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=LAYOUTS, ids=["token-major", "page-major"])
def layout(request: pytest.FixtureRequest) -> RangeLayout:
    found: RangeLayout = request.param
    return found


def shape_of(page_size: int, v_dim: int = DIM, dtype: torch.dtype = torch.float32) -> KvShape:
    return KvShape(LAYERS, HEADS, DIM, v_dim, page_size, PAGES, dtype)


def raw_of(shape: KvShape) -> torch.Tensor:
    return torch.zeros(shape.pages * shape.page_bytes, dtype=torch.uint8)


def paged(view: torch.Tensor, page_size: int) -> torch.Tensor:
    """(pages, page size, heads, dim), as SGLang's attention backends make it of a pool's buffer."""
    if view.dim() == 4:
        return view.permute(0, 2, 1, 3)
    slot = view.stride(0)
    return view.as_strided(
        (len(view) // page_size, page_size, *view.shape[1:]), (slot * page_size, slot, *view.stride()[1:])
    )


@pytest.mark.parametrize("v_dim", [DIM, 7, 0])
def test_views_of_a_layout_share_no_element_and_leave_none_out(layout: RangeLayout, page_size: int, v_dim: int) -> None:
    shape = shape_of(page_size, v_dim)
    raw = raw_of(shape)
    views = [view for both in layout.views(raw, shape) for view in both]
    for number, view in enumerate(views, start=1):
        assert torch.count_nonzero(view) == 0, "somebody else's"
        view.fill_(number)
    assert torch.count_nonzero(raw.view(torch.float32)) == raw.numel() // 4
    assert [paged(view, page_size).shape for view in views] == [
        (PAGES, page_size, HEADS, dim) for dim in (DIM, v_dim) for _ in range(LAYERS)
    ]


def test_a_page_is_the_same_bytes_in_all_layers(layout: RangeLayout, page_size: int) -> None:
    """So a page can be mapped, moved and copied by itself."""
    shape = shape_of(page_size)
    raw = raw_of(shape)
    for both in layout.views(raw, shape):
        for view in both:
            paged(view, page_size)[2] = 1.0
    written = raw.view(PAGES, -1).ne(0).any(dim=1)
    assert written.tolist() == [page == 2 for page in range(PAGES)]


def test_elements_of_a_head_lie_in_a_row(layout: RangeLayout, page_size: int) -> None:
    """As kernels of attention want it."""
    for dtype in (torch.bfloat16, torch.uint8):
        shape = shape_of(page_size, dtype=dtype)
        for both in layout.views(raw_of(shape), shape):
            assert all(paged(view, page_size).stride()[2:] == (DIM, 1) for view in both)


def test_layouts_of_one_token_a_page_are_the_same() -> None:
    shape = shape_of(1)
    raw = torch.arange(shape.pages * shape.page_bytes // 4, dtype=torch.float32).view(torch.uint8)
    for ours, others in zip(*(layout.views(raw, shape) for layout in LAYOUTS), strict=True):
        for a, b in zip(ours, others, strict=True):
            assert torch.equal(paged(a, 1), paged(b, 1))
            assert paged(a, 1).stride() == paged(b, 1).stride(), "also that from token to token"


def test_only_pages_of_keys_and_values_of_one_size_are_an_ordinary_pool_of_rows() -> None:
    for layout, shape in ((TokenMajor(), shape_of(4)), (PageMajor(), shape_of(4, v_dim=7))):
        assert layout.rows(raw_of(shape), shape) is None


def made(page_size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, Rows]:
    shape = shape_of(page_size)
    raw = raw_of(shape)
    rows = PageMajor().rows(raw, shape)
    assert rows is not None
    return *PageMajor().views(raw, shape), raw.view(torch.float32), rows


def test_keys_and_values_stored_by_rows_are_read_by_the_views_of_pages(page_size: int) -> None:
    k_views, v_views, flat, rows = made(page_size)
    loc = torch.randperm(PAGES * page_size)
    told = 1 + torch.rand(LAYERS, 2, len(loc), HEADS * DIM)  # none is 0
    for layer in range(LAYERS):
        k_rows, v_rows = rows.of_layer(layer)
        at = rows.of_step(layer, loc)
        k_rows[at], v_rows[at] = told[layer]
    assert torch.count_nonzero(flat) == flat.numel(), "every byte is somebody's"
    for layer in range(LAYERS):
        for view, expected in zip((k_views[layer], v_views[layer]), told[layer], strict=True):
            found = paged(view, page_size)[loc // page_size, loc % page_size]
            assert torch.equal(found.reshape(len(loc), -1), expected)


def test_rows_of_all_layers_end_where_the_range_ends(page_size: int) -> None:
    _, _, flat, rows = made(page_size)
    last = int(rows.of_tokens(torch.tensor([PAGES * page_size - 1])))
    k_rows, v_rows = rows.of_layer(LAYERS - 1)
    assert last == len(k_rows) - 1 == len(v_rows) - 1
    assert v_rows[last].data_ptr() == flat[-HEADS * DIM :].data_ptr()


def test_kv_rows_are_computed_anew_in_each_step_and_dropped_behind_its_last_layer(page_size: int) -> None:
    *_, rows = made(page_size)
    loc = torch.arange(4)
    first = rows.of_step(0, loc)
    assert rows.of_step(1, loc) is first
    loc += 1  # as the slots of a CUDA graph do
    assert torch.equal(rows.of_step(0, loc), rows.of_tokens(loc))
    rows.of_step(LAYERS - 1, loc)
    assert rows._step is None


def test_kv_rows_of_the_last_step_are_not_used_by_a_step_of_another_size() -> None:
    *_, rows = made(16)
    rows.of_step(0, torch.arange(4))
    assert torch.equal(rows.of_step(1, torch.arange(6)), rows.of_tokens(torch.arange(6)))


POOL = """
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from gpu_scheduler.engines.sglang.kv.pools import pool as ours
from gpu_scheduler.engines.sglang.kv.pools.kv_layouts import KvShape, PageMajor, TokenMajor

LAYERS, HEADS, K_DIM, PAGES, PAGE_SIZE = 2, 3, 4, 5, 8
assert [type(ours.layout_for(*each)) for each in (("fa3", False), ("fa3", True), ("triton", False))] == [
    PageMajor, TokenMajor, TokenMajor
]

for layout in (PageMajor(), TokenMajor()):
    for v_dim in (K_DIM, 7):
        for by_rows in (False, True):
            shape = KvShape(LAYERS, HEADS, K_DIM, v_dim, PAGE_SIZE, PAGES, torch.bfloat16)
            raw = torch.zeros(shape.pages * shape.page_bytes, dtype=torch.uint8)
            rows = layout.rows(raw, shape)
            if by_rows and rows is None:
                continue
            pool = object.__new__(ours.ElasticPool)
            pool.page_size, pool._rows = PAGE_SIZE, rows if by_rows else None
            pool.k_buffer, pool.v_buffer = layout.views(raw, shape)
            ours.store_cache = lambda k, v, k_rows, v_rows, at, **how: (
                k_rows.index_copy_(0, at, k), v_rows.index_copy_(0, at, v))

            def theirs(self, layer, loc, k, v):  # SGLang's writes slots of three dimensions
                self.k_buffer[layer][loc], self.v_buffer[layer][loc] = k, v
            MHATokenToKVPool._store_kv_layer = theirs

            loc = torch.randperm(PAGES * PAGE_SIZE)
            for layer in range(LAYERS):
                k = torch.rand(len(loc), HEADS, K_DIM).to(torch.bfloat16)
                v = torch.rand(len(loc), HEADS, v_dim).to(torch.bfloat16)
                pool._store_kv_layer(layer, loc, k, v)
                for buffer, said, dim in ((pool.k_buffer[layer], k, K_DIM), (pool.v_buffer[layer], v, v_dim)):
                    read = paged_kv_view(buffer, PAGE_SIZE, HEADS, dim)
                    assert read.shape == (PAGES, PAGE_SIZE, HEADS, dim), layout
                    assert read.data_ptr() == buffer.data_ptr()
                    assert torch.equal(read[loc // PAGE_SIZE, loc % PAGE_SIZE], said), (layout, by_rows)
"""


@pytest.mark.sglang
def test_what_the_pool_stores_sglangs_attention_reads_in_each_layout(imported: Imported) -> None:
    imported.run(POOL)
