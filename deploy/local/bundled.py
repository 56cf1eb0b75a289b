"""Models that a word stands for instead of a folder: `make serve MODELS=smollm2`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from deploy.local.smollm2.folder import FOLDER as SMOLLM2

BUNDLED = {"smollm2": SMOLLM2}
"""Word -> its folder, which `python -m deploy.local.WORD` makes."""


def path_of(text: str) -> str:
    """The path that a user means: the folder of a word, else the text itself."""
    return str(BUNDLED.get(text, text))


async def make(folders: Collection[Path], stopping: asyncio.Future[Any]) -> None:
    """Makes those of the folders that belong to a word. The process that makes one prints what it does, and why it
    cannot. Returns early when `stopping` is done."""
    for word in [word for word, folder in BUNDLED.items() if folder in folders]:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"deploy.local.{word}"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
        )
        ended = asyncio.get_running_loop().create_task(child.wait())
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            child.terminate()
        await ended
