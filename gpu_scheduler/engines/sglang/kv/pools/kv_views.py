"""Views of the keys and values in a range of bytes, which lie token by token: the K and V of all layers of a token
together, layer by layer. A page of tokens is one KV block (envelope), and pages are packed back to back. Pure tensor
arithmetic, on any device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KvShape:
    """The KV of one model on one device."""

    layers: int
    heads: int
    k_dim: int
    """Elements of a key of one head."""
    v_dim: int
    """Elements of a value of one head; 0 where values are parts of the keys (latent rows)."""
    page_size: int
    """Tokens of a page."""
    pages: int
    dtype: torch.dtype

    @property
    def token_elements(self) -> int:
        """Elements of one token in all layers."""
        return self.layers * self.heads * (self.k_dim + self.v_dim)

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_elements * self.dtype.itemsize


def kv_views(raw: torch.Tensor, shape: KvShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of each layer, (slots, heads, dim), as views of the bytes `raw`, (pages * page_bytes,). The views are
    like the buffers of any pool of SGLang's, but for the distance from slot to slot, which is a token of all layers."""
    flat, slots = raw.view(shape.dtype), shape.pages * shape.page_size
    k_row, v_row = shape.heads * shape.k_dim, shape.heads * shape.v_dim

    def view(layer: int, dim: int, behind: int) -> torch.Tensor:
        strides = (shape.token_elements, dim, 1)
        return flat.as_strided((slots, shape.heads, dim), strides, layer * (k_row + v_row) + behind)

    layers = range(shape.layers)
    return [view(each, shape.k_dim, 0) for each in layers], [view(each, shape.v_dim, k_row) for each in layers]


def state_views(
    raw: torch.Tensor, layers: int, stride_bytes: int, parts: Iterable[tuple[Sequence[int], torch.dtype]]
) -> list[torch.Tensor]:
    """The tensors of states as views of the bytes `raw`, (states * stride_bytes,): for each part of a state, given as
    (shape in one layer, dtype), a view (layers, states, *shape). Raises ValueError for a part that would begin inside
    one of its numbers."""
    found, begin = [], 0
    for shape, dtype in parts:
        size = torch.Size(shape).numel()
        if begin % dtype.itemsize or stride_bytes % dtype.itemsize:
            raise ValueError(f"a part of a state in {dtype} begins at byte {begin} of {stride_bytes}")
        strides = [size, stride_bytes // dtype.itemsize]
        strides += [torch.Size(shape[axis + 1 :]).numel() for axis in range(len(shape))]
        sizes = (layers, len(raw) // stride_bytes, *shape)
        found.append(raw.view(dtype).as_strided(sizes, strides, begin // dtype.itemsize))
        begin += layers * size * dtype.itemsize
    return found


def heads_of_states(states: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The states of one layer, (slots, heads, rows, columns), for kernels that take them back to back: (contiguous view
    (entries, 1, rows, columns) of which each entry is one head, number of entries from one slot to the next). The first
    head of slot `i` is entry `i` times that number. Raises ValueError if slots are no whole number of heads apart."""
    heads, rows, columns = states.shape[1:]
    size = rows * columns
    step, rest = divmod(states.stride(0), size)
    if rest or states.stride()[1:] != (size, columns, 1):
        raise ValueError(f"states of {tuple(states.shape)} with strides {states.stride()} are not rows of whole heads")
    entries = (len(states) - 1) * step + heads
    return states.as_strided((entries, 1, rows, columns), (size, size, columns, 1)), step
