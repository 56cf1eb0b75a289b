"""A page-major range seen as an ordinary pool, for SGLang's kernel that stores into ordinary pools."""

from __future__ import annotations

import torch


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
        """Rows of K and of V in one layer, (rows, row) each. They overlap those of other layers: a token has the same
        row number in all layers."""
        return self._layers[layer]

    def of_tokens(self, loc: torch.Tensor) -> torch.Tensor:
        """Row numbers of tokens, from their slots `loc`; same shape."""
        return torch.add(loc, loc // self._page_size, alpha=self._in_page - self._page_size)

    def of_step(self, layer: int, loc: torch.Tensor) -> torch.Tensor:
        """Row numbers of the tokens of a step, from their slots `loc`. The first layer of a step computes them, and
        inside every CUDA graph too: a graph's slots change from replay to replay. They are dropped after the last
        layer."""
        rows = self._step
        if layer == 0 or rows is None or rows.shape != loc.shape:
            rows = self.of_tokens(loc)
        self._step = rows if layer + 1 < len(self._layers) else None
        return rows
