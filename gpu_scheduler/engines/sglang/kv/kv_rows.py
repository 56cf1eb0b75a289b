"""A page-major range seen as an ordinary pool, for SGLang's kernel that stores into ordinary pools."""

from __future__ import annotations

import torch


class Rows:
    """A page-major range as rows of `row` elements, each the K or the V of one token in one layer."""

    def __init__(self, flat: torch.Tensor, layers: int, page_size: int, row: int) -> None:
        """`flat`: whole pages, of as many elements."""
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
        """Those of K and of V. They overlap those of other layers: a token's row is the same number in all."""
        return self._layers[layer]

    def of_tokens(self, loc: torch.Tensor) -> torch.Tensor:
        """The numbers of tokens' rows, by their slots."""
        return torch.add(loc, loc // self._page_size, alpha=self._in_page - self._page_size)

    def of_step(self, layer: int, loc: torch.Tensor) -> torch.Tensor:
        """The same, computed by the first layer of a step, and inside of every CUDA graph: a graph's slots change from
        replay to replay. Nothing of it is kept behind the last layer."""
        rows = self._step
        if layer == 0 or rows is None or rows.shape != loc.shape:
            rows = self.of_tokens(loc)
        self._step = rows if layer + 1 < len(self._layers) else None
        return rows
