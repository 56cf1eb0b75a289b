"""Compiles each new grammar in a process where it can do no harm, before an engine sees it
(`engines/sglang/grammar/sandbox.py`), and remembers which ones can be compiled."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from hashlib import sha256

from gpu_scheduler.engines.kinds import KINDS
from services.errors import Unavailable
from services.ipc.line_process import LineProcess
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
START_S = 120.0
"""Seconds until the process has to be ready: imports of torch and xgrammar take two seconds, on a cold and busy disk a
minute."""
ANSWER_S = 60.0
"""Seconds until an answer is given up. The process bounds a grammar to a few seconds of processor time, so that an
answer takes this long only if the process itself is stopped."""
KNOWN = 4096


class GrammarSandbox:
    """One compiling process for all models of a group. It is started by the first grammar, which waits for it."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-m", KINDS["sglang"].grammar_sandbox)) -> None:
        self._command = command
        self._process: LineProcess | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self._known: dict[bytes, str] = {}
        """Verdicts by digest of the grammar, the least recently used first."""

    def known(self, kind: str, text: str) -> str | None:
        """Why a grammar cannot be compiled; empty: it can be; None: it was not tried yet."""
        digest = _digest(kind, text)
        verdict = self._known.pop(digest, None)
        if verdict is not None:
            self._known[digest] = verdict
        return verdict

    async def verdict(self, kind: str, text: str) -> str:
        """Why a grammar cannot be compiled; empty: it can be. Tries it if that is not known yet, one grammar after the
        other. Raises Unavailable if it could not be tried."""
        # The caller may be cancelled; a trial that has begun goes on, for the next request with this grammar.
        return await asyncio.shield(tasks.spawn(self._in_turn(kind, text), "try a grammar"))

    async def close(self) -> None:
        """Stops the process; later grammars raise Unavailable."""
        self._closed = True
        await self._stop()

    async def _in_turn(self, kind: str, text: str) -> str:
        async with self._turn:
            found = self.known(kind, text)
            if found is None:
                found = await self._tried(kind, text)
                self._known[_digest(kind, text)] = found
                while len(self._known) > KNOWN:
                    del self._known[next(iter(self._known))]
            return found

    async def _tried(self, kind: str, text: str) -> str:
        try:
            if self._process is not None and not self._process.alive:
                await self._stop()  # it died while it was idle
            process = self._process or await self._started()
            found = json.loads(await process.ask(json.dumps([kind, text]).encode(), ANSWER_S))
        except (OSError, ValueError, TimeoutError) as error:
            await self._stop()
            _log.warning("a grammar cannot be tried", why=str(error) or type(error).__name__)
            raise Unavailable("the process that tries grammars has failed; ask again") from None
        if found is None:
            raise Unavailable("the trial of a grammar was killed; ask again")
        return str(found)

    async def _started(self) -> LineProcess:
        process = await LineProcess.start(self._command, START_S)
        if self._closed:
            await process.stop()
            raise OSError("the group has ended")
        self._process = process
        return process

    async def _stop(self) -> None:
        """Stops the process; the next grammar starts another one."""
        process, self._process = self._process, None
        if process is not None:
            await process.stop()


def _digest(kind: str, text: str) -> bytes:
    return sha256(f"{kind}\0{text}".encode()).digest()
