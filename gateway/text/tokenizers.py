"""The tokenizers in use, and the threads that work with them.

Loading a tokenizer takes a second and encoding a long prompt tens of milliseconds, so a few threads do both. The
tokenizer's own code releases the interpreter's lock only while it encodes a batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from gateway.errors import TooMany
from services.telemetry import log
from services.wording.plurals import agreeing, counted
from tokenization.loading import load
from tokenization.tokenizer import Tokenizer

MOST_ASIDE = 64
"""The most texts that wait for a thread aside."""
_KEPT = 64
"""The most tokenizers that stay in memory, of which a large one takes about 100 MiB: more models than a gateway's fleet
serves at a time, and less memory than the process may take."""
_INLINE_CHARACTERS = 4096
"""The longest text that is encoded at once, which takes about a millisecond: less than a thread's turn costs under
load."""
R = TypeVar("R")
Folder = tuple[str, int]
"""A folder's path, and the generation of its files."""
_log = log.get(__name__)


class Tokenizers:
    """The tokenizers in use, by folder and generation, and the threads that work with them."""

    def __init__(
        self,
        *,
        threads: int,
        kept: int = _KEPT,
        inline_characters: int = _INLINE_CHARACTERS,
        loader: Callable[[str], Tokenizer] = load,
    ):
        """`kept`: how many stay in memory. `inline_characters`: a text up to this length is encoded at once."""
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._turn = asyncio.Semaphore(max(1, threads - 1))
        """Limits work that runs aside; one thread is left for prompts."""
        self._waiting = 0
        """Number of texts that wait for a thread aside."""
        self._kept = kept
        self._inline_characters = inline_characters
        self._loader = loader
        self._known: OrderedDict[Folder, asyncio.Future[Tokenizer]] = OrderedDict()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Has `listener` called in the loop whenever a load has ended, well or not."""
        self._listeners.append(listener)

    def failure(self, path: str, generation: int) -> str:
        """Why the last load of a folder failed; empty if it did not, or there was none."""
        found = self._known.get((path, generation))
        if found is None or not found.done() or found.cancelled():
            return ""
        error = found.exception()
        return "" if error is None else str(error)

    def loaded(self, path: str, generation: int) -> Tokenizer | None:
        """The tokenizer of a folder, if it is loaded."""
        found = self._known.get((path, generation))
        if found is None or not found.done() or found.cancelled() or found.exception() is not None:
            return None
        return found.result()

    async def get(self, path: str, generation: int) -> Tokenizer:
        """The tokenizer of a folder, loaded once for all callers that wait for it. Raises Unmet; the next call tries
        again."""
        key = (path, generation)
        found = self._known.get(key)
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            found = self._begin(key)
        else:
            self._known.move_to_end(key)
            if found.done():
                return found.result()
        return await asyncio.shield(found)

    def prefetch(self, folders: Iterable[Folder]) -> None:
        """Begins to load the tokenizers of folders that are not loaded."""
        for path, generation in folders:
            if (path, generation) not in self._known:
                self._begin((path, generation))

    def _begin(self, key: Folder) -> asyncio.Future[Tokenizer]:
        before = self.failure(*key)
        loading = asyncio.get_running_loop().run_in_executor(self._threads, self._loader, key[0])
        self._known[key] = loading
        loading.add_done_callback(partial(self._ended, key, before))
        while len(self._known) > self._kept:
            self._known.popitem(last=False)
        return loading

    def _ended(self, key: Folder, before: str, loading: asyncio.Future[Tokenizer]) -> None:
        why = "" if loading.cancelled() or loading.exception() is None else str(loading.exception())
        if why and why != before:
            _log.warning("no tokenizer for a model", folder=key[0], why=why)
        for listener in self._listeners:
            listener()

    async def run(self, characters: int, work: Callable[..., R], *arguments: Any, **options: Any) -> R:
        """The result of `work`, which runs in a thread if there are more than a few characters."""
        if characters <= self._inline_characters:
            return work(*arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments, **options))

    async def run_aside(self, characters: int, work: Callable[..., R], *arguments: Any, **options: Any) -> R:
        """The result of `work` that no answer waits for; it uses one thread less. It keeps its thread until the work is
        done, even if its caller has gone. Raises TooMany."""
        if characters <= self._inline_characters:
            return work(*arguments, **options)
        if self._waiting >= MOST_ASIDE:
            raise TooMany(
                f"{counted(self._waiting, 'text')} {agreeing(self._waiting, 'is', 'are')} waiting to be tokenized or "
                "put together"
            )
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()

        def done(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._turn.release)

        doing = self._threads.submit(partial(work, *arguments, **options))
        doing.add_done_callback(done)
        return await asyncio.wrap_future(doing)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
