"""Where the keys and values of a token lie in a page-major range."""

from __future__ import annotations

import pytest
import torch

from gpu_scheduler.engines.sglang.kv.kv_rows import Rows

LAYERS, HEADS, DIM, PAGES = 3, 2, 4, 5


@pytest.fixture(params=[1, 3, 16])
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def made(page_size: int) -> tuple[torch.Tensor, Rows]:
    flat = torch.zeros(PAGES * page_size * LAYERS * 2 * HEADS * DIM)
    return flat, Rows(flat, LAYERS, page_size, HEADS * DIM)


def test_keys_and_values_stored_by_rows_are_read_by_the_views_of_pages(page_size: int) -> None:
    flat, rows = made(page_size)
    pages = flat.view(PAGES, LAYERS, 2, page_size, HEADS, DIM)  # as SGLang's attention reads them
    loc = torch.randperm(PAGES * page_size)
    told = 1 + torch.rand(LAYERS, 2, len(loc), HEADS * DIM)  # none is 0
    for layer in range(LAYERS):
        k_rows, v_rows = rows.of_layer(layer)
        at = rows.of_step(layer, loc)
        k_rows[at], v_rows[at] = told[layer]
    assert torch.count_nonzero(flat) == flat.numel(), "every byte is somebody's"
    for layer in range(LAYERS):
        for which, expected in enumerate(told[layer]):
            found = pages[:, layer, which][loc // page_size, loc % page_size]
            assert torch.equal(found.reshape(len(loc), -1), expected)


def test_rows_of_all_layers_end_where_the_range_ends(page_size: int) -> None:
    flat, rows = made(page_size)
    last = int(rows.of_tokens(torch.tensor([PAGES * page_size - 1])))
    k_rows, v_rows = rows.of_layer(LAYERS - 1)
    assert last == len(k_rows) - 1 == len(v_rows) - 1
    assert v_rows[last].data_ptr() == flat[-HEADS * DIM :].data_ptr()


def test_kv_rows_are_computed_anew_in_each_step_and_dropped_behind_its_last_layer(page_size: int) -> None:
    _, rows = made(page_size)
    loc = torch.arange(4)
    first = rows.of_step(0, loc)
    assert rows.of_step(1, loc) is first
    loc += 1  # as the slots of a CUDA graph do
    assert torch.equal(rows.of_step(0, loc), rows.of_tokens(loc))
    rows.of_step(LAYERS - 1, loc)
    assert rows._step is None


def test_kv_rows_of_the_last_step_are_not_used_by_a_step_of_another_size() -> None:
    _, rows = made(16)
    rows.of_step(0, torch.arange(4))
    assert torch.equal(rows.of_step(1, torch.arange(6)), rows.of_tokens(torch.arange(6)))
