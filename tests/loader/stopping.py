"""`python -m tests.loader.stopping FOLDER --config FILE`: a loader whose copies stop after their first chunk.

Each opens the fifo FOLDER/reached for writing, then FOLDER/gate for reading: a test that opens the other ends knows
that a copy has come so far, and says when it goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from loader import __main__ as loader
from loader.transfers.base import Tidy
from loader.transfers.cpu import CpuTransfer


def stop_after_the_first(name: str, folder: Path) -> None:
    original = getattr(CpuTransfer, name)

    def stopping(self: CpuTransfer, *arguments: Any) -> Tidy:
        *others, done = arguments
        first = True

        def step(part: Any) -> None:
            nonlocal first
            done(part)
            if first:
                first = False
                (folder / "reached").write_text("here")
                (folder / "gate").read_text()

        return original(self, *others, step)  # type: ignore[no-any-return]

    setattr(CpuTransfer, name, stopping)


if __name__ == "__main__":
    where = Path(sys.argv.pop(1))
    for each in ("into", "out_of", "between"):
        stop_after_the_first(each, where)
    loader.main()
