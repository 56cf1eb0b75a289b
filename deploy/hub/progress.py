"""Progress of a download, as the hub's library tells it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from services.runtime.progress import BAR, Far, ProgressLines, drawn

_BYTES_WRITTEN = "huggingface_hub.snapshot_download"
"""The library's name of the one bar that counts bytes on disk."""
_STEP = "fetching"


class Progress:
    """Shows one download of so many bytes while the context is open. `bars`: what the library is given as its class of
    bars."""

    def __init__(self, total_bytes: int, say: Callable[[str], None]) -> None:
        shown: list[tqdm] = []

        class Bar(tqdm):  # type: ignore[misc]
            total = property(lambda self: total_bytes, lambda self, value: None)
            """The library learns sizes file by file; here they are known."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                counts = kwargs.get("name") == _BYTES_WRITTEN
                if not counts:
                    kwargs["disable"] = True
                kwargs |= {"position": 0, "leave": False, "bar_format": BAR}
                super().__init__(*args, **kwargs)
                self._lines = ProgressLines(say) if counts and self.disable else None
                self._began, self._done = time.monotonic(), 0
                if counts:
                    shown.append(self)

            @property
            def format_dict(self) -> dict[str, Any]:
                return drawn(super().format_dict, "prism", Far(_STEP, self.n, total_bytes))

            def update(self, n: float | None = 1) -> Any:
                if self._lines is not None:
                    self._done += int(n or 0)
                    rate = self._done / max(time.monotonic() - self._began, 1e-3)
                    self._lines.show(Far(_STEP, self._done, total_bytes, per_s=rate))
                return super().update(n)

        self.bars: type[tqdm] = Bar
        self._shown = shown

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._shown:
            bar.close()
