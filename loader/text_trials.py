"""Whether the tokenizer, chat template and configuration of a model's folder can be used, found out when the model is
listed: by a process of its own (`tokenization/trial.py`), since what broken files do to the libraries that read them
nobody knows."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence

from services import log, tasks
from services.line_process import LineProcess

_log = log.get(__name__)
MODULE = "tokenization.trial"
START_S = 120.0
"""Imports of transformers take a second; on a cold and busy disk a minute."""
ANSWER_S = 120.0
"""A tokenizer takes a second; the largest on a slow file system some ten."""
_KNOWN = 4096
Folder = tuple[str, int]
"""A folder's path, and the generation of its files."""


class TextTrials:
    """Tries folders one after the other. Its process lives while there are some to try."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self._command = command
        self._process: LineProcess | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: dict[Folder, str] = {}
        """Verdicts, that of the longest ago at the front."""

    async def verdict(self, path: str, generation: int) -> str:
        """Why the folder's text cannot be used, in one line without its path; empty when it can, or could not be
        tried."""
        # Who waits may be cancelled; what was begun is somebody else's next answer.
        return await asyncio.shield(tasks.spawn(self._in_turn((path, generation)), "try a tokenizer"))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def _in_turn(self, folder: Folder) -> str:
        self._waiting += 1
        try:
            async with self._turn:
                found = self._known.pop(folder, None)
                if found is None:
                    found = await self._tried(folder[0])
                if found is None:
                    return ""
                self._known[folder] = found
                while len(self._known) > _KNOWN:
                    del self._known[next(iter(self._known))]
                return found
        finally:
            self._waiting -= 1
            if not self._waiting:
                await self.close()

    async def _tried(self, path: str) -> str | None:
        """None: it could not be tried. A folder at which the process dies is that folder's fault."""
        try:
            if self._process is None or not self._process.alive:
                self._process = await LineProcess.start(self._command, START_S)
        except (OSError, TimeoutError) as error:
            _log.warning("tokenizers cannot be tried", why=str(error) or type(error).__name__)
            return None
        try:
            return str(json.loads(await self._process.ask(json.dumps(path).encode(), ANSWER_S)))
        except TimeoutError:
            why = f"its tokenizer cannot be read within {ANSWER_S:.0f} s"
        except OSError:
            why = "its tokenizer ends the process that reads it"
        await self.close()
        return why
