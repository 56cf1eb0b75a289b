"""The layouts of KV in a range of bytes: where the keys and values of a token lie. A page is one KV block (envelope) in
every layout, and pages are packed back to back. Pure tensor arithmetic, on any device.

token-major    token by token: the K and V of all layers lie together, layer by layer
page-major     page by page: layer by layer, the K of all tokens of the page lie together, and then their V
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
        """Bytes of a page, in every layout."""
        return self.page_size * self.token_elements * self.dtype.itemsize


class RangeLayout(Protocol):
    """One way to lay KV out."""

    def views(self, raw: torch.Tensor, shape: KvShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of each layer, as views of the bytes `raw`, (pages * page_bytes,), in a shape that SGLang's attention
        takes."""
        ...

    def rows(self, raw: torch.Tensor, shape: KvShape) -> Rows | None:
        """The same bytes as rows, for SGLang's kernel that stores into ordinary pools; None where the views are an
        ordinary pool already, or K and V differ in size."""
        ...


class TokenMajor:
    """The layout in which a view of one layer is (slots, heads, dim), as in any pool of SGLang's. The distance between
    slots is a token of all layers."""

    def views(self, raw: torch.Tensor, shape: KvShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        flat, slots = raw.view(shape.dtype), shape.pages * shape.page_size
        k_row, v_row = shape.heads * shape.k_dim, shape.heads * shape.v_dim

        def view(layer: int, dim: int, behind: int) -> torch.Tensor:
            strides = (shape.token_elements, dim, 1)
            return flat.as_strided((slots, shape.heads, dim), strides, layer * (k_row + v_row) + behind)

        layers = range(shape.layers)
        return [view(each, shape.k_dim, 0) for each in layers], [view(each, shape.v_dim, k_row) for each in layers]

    def rows(self, raw: torch.Tensor, shape: KvShape) -> Rows | None:
        return None


class PageMajor:
    """The layout in which a view of one layer is (pages, heads, page size, dim). SGLang's attention backends know this
    shape for pools whose pages are no rows of slots, and take the strides from the view. FlashAttention reads it,
    Triton's attention does not."""

    def views(self, raw: torch.Tensor, shape: KvShape) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        flat, size = raw.view(shape.dtype), shape.page_size
        k_block, v_block = size * shape.heads * shape.k_dim, size * shape.heads * shape.v_dim

        def view(layer: int, dim: int, behind: int) -> torch.Tensor:
            # The next token is a page further where a page has one, as SGLang's own views of such pages tell kernels.
            strides = (size * shape.token_elements, dim, shape.heads * dim if size > 1 else shape.token_elements, 1)
            first = layer * (k_block + v_block) + behind
            return flat.as_strided((shape.pages, shape.heads, size, dim), strides, first)

        layers = range(shape.layers)
        return [view(each, shape.k_dim, 0) for each in layers], [view(each, shape.v_dim, k_block) for each in layers]

    def rows(self, raw: torch.Tensor, shape: KvShape) -> Rows | None:
        if shape.k_dim != shape.v_dim:
            return None
        return Rows(raw.view(shape.dtype), shape.layers, shape.page_size, shape.heads * shape.k_dim)


class Rows:
    """A page-major range as rows of `row` elements, each the K or the V of one token in one layer."""

    def __init__(self, flat: torch.Tensor, layers: int, page_size: int, row: int) -> None:
        """`flat`: all elements of the range, (elements,), in whole pages."""
        rows = flat.view(-1, row)
        self._page_size = page_size
        self._in_page = 2 * layers * page_size
        count = len(rows) - self._in_page + page_size
        self._layers = [
            (rows[first : first + count], rows[first + page_size : first + page_size + count])
            for first in range(0, self._in_page, 2 * page_size)
        ]
        self._step: torch.Tensor | None = None

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of K and of V in one layer, (rows, row) each. A token has the same row number in every layer, so the
        tensors of different layers overlap, each beginning at its own first row."""
        return self._layers[layer]

    def of_tokens(self, loc: torch.Tensor) -> torch.Tensor:
        """Row numbers of tokens, from their slots `loc`; same shape."""
        return torch.add(loc, loc // self._page_size, alpha=self._in_page - self._page_size)

    def of_step(self, layer: int, loc: torch.Tensor) -> torch.Tensor:
        """Row numbers of the tokens of a step, from their slots `loc`. They are computed for the first layer, kept for
        the others, and dropped after the last. A CUDA graph computes them anew at every replay, since its slots
        change."""
        rows = self._step
        if layer == 0 or rows is None or rows.shape != loc.shape:
            rows = self.of_tokens(loc)
        self._step = rows if layer + 1 < len(self._layers) else None
        return rows
