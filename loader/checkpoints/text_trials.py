"""Whether the tokenizer, chat template and configuration of a model's folder can be used, found out when the model is
listed: by a process of its own (`tokenization/trial.py`), since broken files may make the libraries that read them do
anything."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.ipc.line_process import LineProcess
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
MODULE = "tokenization.trial"
START_S = 120.0
"""Seconds for a start: imports of transformers take a second; on a cold and busy disk a minute."""
ANSWER_S = 120.0
"""Seconds for an answer: a tokenizer takes a second; the largest on a slow file system some ten."""
_KNOWN = 4096
Folder = tuple[str, int]
"""(path of a folder, generation of its files)."""


@dataclass(frozen=True)
class TextFault:
    """Why the text of a model cannot be used: one line without the path of its folder."""

    why: str
    may_pass: bool = False
    """Whether the same files may be usable later."""


class TextTrials:
    """Tries folders one after the other, in a process that lives while there are some to try."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self._command = command
        self._process: LineProcess | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: dict[Folder, TextFault | None] = {}
        """Verdicts that stay with the files, the one used longest ago first."""

    async def fault(self, path: str, generation: int, present: Callable[[], int]) -> TextFault | None:
        """The fault of a folder's text; None when it can be used, or could not be tried. `present`: the generation of
        the files that are there now, which blocks on the file system; the verdict on files that were not there all the
        time says nothing about those of `generation`."""
        if (path, generation) in self._known:
            return self._verdict((path, generation))
        # This caller may be cancelled; what was begun is the next caller's answer.
        return await asyncio.shield(tasks.spawn(self._in_turn((path, generation), present), "try a tokenizer"))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    async def _in_turn(self, folder: Folder, present: Callable[[], int]) -> TextFault | None:
        self._waiting += 1
        try:
            async with self._turn:
                if folder in self._known:
                    return self._verdict(folder)
                try:
                    found = await self._confirmed(folder[0])
                except (OSError, TimeoutError) as error:
                    _log.warning("tokenizers cannot be tried", why=str(error) or type(error).__name__)
                    return None
                if await asyncio.to_thread(present) != folder[1]:
                    return found and replace(found, may_pass=True)
                if found is None or not found.may_pass:
                    self._known[folder] = found
                    while len(self._known) > _KNOWN:
                        del self._known[next(iter(self._known))]
                return found
        finally:
            self._waiting -= 1
            if not self._waiting:
                await self.close()

    def _verdict(self, folder: Folder) -> TextFault | None:
        """The remembered verdict on a folder, which is used once more."""
        self._known[folder] = self._known.pop(folder)
        return self._known[folder]

    async def _confirmed(self, path: str) -> TextFault | None:
        """The fault of a folder's text, None if there is none. A fault lasts if two trials find it: a folder that was
        away for a moment, and is back as it was, looks like one that lacks files. Raises as `_tried`."""
        found = await self._tried(path)
        if found is None or found.may_pass:
            return found
        again = await self._tried(path)
        return again if again in (None, found) else replace(found, may_pass=True)

    async def _tried(self, path: str) -> TextFault | None:
        """The fault of a folder's text, None if there is none. Raises OSError, TimeoutError where the process cannot be
        started. What the process does at a folder is that folder's fault, though a slow disk or short memory may be
        behind it."""
        if self._process is None or not self._process.alive:
            self._process = await LineProcess.start(self._command, START_S)
        try:
            why, may_pass = json.loads(await self._process.ask(json.dumps(path).encode(), ANSWER_S))
            return TextFault(why, may_pass) if why else None
        except TimeoutError:
            found = TextFault(f"its tokenizer and chat template cannot be read within {ANSWER_S:.0f} s", may_pass=True)
        except OSError:
            found = TextFault("its tokenizer ends the process that reads it", may_pass=True)
        await self.close()
        return found
