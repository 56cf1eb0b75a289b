"""The loader's part for engines without a scheduler: an engine's weights leave for host memory and come back."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Callable, Sequence

from loader.copies.handoff_client import HandoffClient
from loader.policy.chunks import Chunk, plan
from loader.transfers import Transfers
from loader.transfers.base import Borrowed, Tidy
from services.runtime import tasks

_CHUNK_BYTES = 32 << 20
_Copy = Callable[[Sequence[Borrowed], memoryview, Sequence[Chunk], Callable[[Chunk], None]], Tidy]


class Image:
    """Of one lease's weights."""

    def __init__(self, handoff: str, device: str, nbytes: int) -> None:
        self._client = HandoffClient(handoff, answer_timeout_s=30.0)
        self._task = tasks.spawn(self._client.run(), "handoff")
        self._transfers = Transfers()
        self._transfer = self._transfers.of(device)
        self._nbytes = nbytes
        self._memory = memoryview(mmap.mmap(-1, nbytes))
        self._copying: asyncio.Task[None] | None = None
        self.copy_s = 0.0
        """Seconds that the last copy took, from extents that were borrowed to the last byte."""

    async def take(self, lease_id: str) -> None:
        await self._copy(lease_id, self._transfer.out_of)

    async def put(self, lease_id: str) -> None:
        """Returns with the last byte, as the loader does: what was mapped for the copy is unmapped afterwards."""
        await self._copy(lease_id, self._transfer.into)

    async def _copy(self, lease_id: str, copy: _Copy) -> None:
        await self.tidied()
        copied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copying = tasks.spawn(self._copy_and_tidy(lease_id, copy, copied), "copy")
        await copied

    async def _copy_and_tidy(self, lease_id: str, copy: _Copy, copied: asyncio.Future[None]) -> None:
        try:
            async with self._client.borrowed(lease_id) as extents:
                steps = plan([extent.nbytes for extent in extents], self._nbytes, _CHUNK_BYTES)
                begun = time.monotonic()
                tidy = await asyncio.to_thread(copy, extents, self._memory, steps, lambda _: None)
                self.copy_s = time.monotonic() - begun
                copied.set_result(None)
                await asyncio.to_thread(tidy)
        except Exception as error:
            if copied.done():
                raise
            copied.set_exception(error)

    async def tidied(self) -> None:
        """Returns once nothing is borrowed any more."""
        if self._copying is not None:
            await self._copying

    async def close(self) -> None:
        await self.tidied()
        await tasks.cancel(self._task)
        self._transfers.forget(self._memory)
