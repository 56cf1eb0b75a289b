"""Saving and loading images, and copying one lease's weights to another's: extents are borrowed, bytes copied in a
thread, extents given back, whatever happens between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from loader.handoff_client import HandoffClient
from loader.image_memory import Image
from loader.images import Images
from loader.metrics import COPIED
from loader.models import Models
from loader.policy import chunks
from loader.policy.chunks import Chunk, Pair
from loader.policy.links import Work
from loader.threads import Moved, counted
from loader.transfers.base import Borrowed, Transfer
from services import log
from services.checksum import Checksum
from services.errors import Unavailable, Unmet

_log = log.get(__name__)

_BETWEEN = 4
"""Chunks between two devices are so many times as large: as many a second, where they come that much faster."""
Step = int | Image
"""Of a copy under way: the bytes done so far; in the end the image."""


class Copying:
    """Several copies run at a time, each in a thread; a closed or cancelled iteration stops its copy and waits for the
    thread, so that nothing is given back that is still written to."""

    def __init__(
        self,
        models: Models,
        images: Images,
        handoff: HandoffClient,
        transfer_for: Callable[[str], Transfer],
        *,
        chunk_bytes: int,
        threads: int,
        answer_timeout_s: float,
    ) -> None:
        self._models = models
        self._images = images
        self._handoff = handoff
        self._transfer_for = transfer_for
        """Of a device, by name."""
        self._chunk_bytes = chunk_bytes
        self._answer_timeout_s = answer_timeout_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="copy")
        self._saving: WeakValueDictionary[tuple[str, int], asyncio.Lock] = WeakValueDictionary()

    async def save(
        self,
        model: str,
        generation: int,
        lease_id: str,
        manifest: bytes,
        total_bytes: int,
        checksum: str,
        rank: int = 0,
    ) -> AsyncGenerator[Step, None]:
        """Makes the image of a model, or a rank's part of it, out of a lease's weights; one that is there already is
        kept. Ends with the image, which the keeper holds by then.

        Raises NotFound (model, lease), Unmet when the checkpoint is of another generation by now, the lease does not
        hold what the manifest says or the checksum differs, Refused when host memory is short, Unavailable while
        balloond or the keeper are away."""
        present = self._models.get(model).generation
        if generation != present:
            raise Unmet(f"{model} is of generation {present} by now, the engine's weights are of {generation}")
        # A second one for the same waits, and then finds the image.
        lock = self._saving.setdefault((model, rank), asyncio.Lock())
        async with lock:
            image = self._images.get(model, rank)
            if image is not None and (image.generation, image.manifest) == (generation, manifest):
                _agree(model, checksum, image.checksum)
                yield image
                return
            async with self._handoff.borrowed(lease_id) as extents:
                plan = self._plan(extents, total_bytes, lease_id)
                with self._images.blank(model, generation, total_bytes, manifest, rank) as image:
                    with image.weights() as weights:
                        seen = _Seen(weights)
                        transfer = self._transfer_for(extents[0].device)
                        move = partial(transfer.out_of, extents, weights, plan)
                        async with aclosing(self._copy(move, "save", seen.add)) as steps:
                            async for step in steps:
                                yield step
                    _agree(model, checksum, seen.checksum.text())
                    await self._images.publish_within(self._answer_timeout_s, image, seen.checksum.text())
            _log.info("image saved", model=model, bytes=image.total_bytes, checksum=image.checksum)
            yield image

    async def load(
        self, model: str, generation: int, lease_id: str, manifest: bytes, total_bytes: int, rank: int = 0
    ) -> AsyncGenerator[Step, None]:
        """Copies the image of a model, or a rank's part of it, into a lease's weights. Ends with the image.

        Raises Unmet when there is no image of this generation and manifest, or the lease is too small for it, NotFound
        when the lease is gone, Unavailable while balloond is away."""
        image = self._images.get(model, rank)
        if image is None:
            raise Unmet(f"there is no image of {model}")
        if image.generation != generation:
            raise Unmet(f"the image of {model} is of generation {image.generation}, not of {generation}")
        if image.manifest != manifest:
            raise Unmet(f"the image of {model} was made by an engine that lays its weights out in another way")
        with self._images.using(image) as weights:
            async with self._handoff.borrowed(lease_id) as extents:
                plan = self._plan(extents, total_bytes, lease_id)
                transfer = self._transfer_for(extents[0].device)
                async with aclosing(self._copy(partial(transfer.into, extents, weights, plan), "load")) as steps:
                    async for step in steps:
                        yield step
        yield image

    async def between(self, source_lease_id: str, target_lease_id: str, total_bytes: int) -> AsyncGenerator[int, None]:
        """Copies the first bytes of a lease's weights to another's, on any device; both hold as much. Ends with
        `total_bytes`. The source is only read: its engine may be serving.

        Raises Unmet when a lease is too small, both are the same, or there is no way between their devices, NotFound
        when one is gone, Unavailable while balloond is away."""
        if source_lease_id == target_lease_id:
            raise Unmet(f"lease {source_lease_id} is the source and the target")
        async with AsyncExitStack() as stack:
            # In one order everywhere, or two copies that cross each other would wait for ever.
            lent = {
                lease_id: await stack.enter_async_context(self._handoff.borrowed(lease_id))
                for lease_id in sorted((source_lease_id, target_lease_id))
            }
            sources, targets = lent[source_lease_id], lent[target_lease_id]
            plan = self._plan_between(sources, targets, total_bytes, f"{source_lease_id} to {target_lease_id}")
            move = partial(self._transfer_for(sources[0].device).between, sources, targets, plan)
            async with aclosing(self._copy(move, "between")) as steps:
                async for step in steps:
                    yield step
        yield total_bytes

    # --- parts

    def _plan(self, extents: Sequence[Borrowed], total_bytes: int, lease_id: str) -> Sequence[Chunk]:
        try:
            return chunks.plan([extent.nbytes for extent in extents], total_bytes, self._chunk_bytes)
        except ValueError as error:
            raise Unmet(f"lease {lease_id}: {error}") from None

    def _plan_between(
        self, sources: Sequence[Borrowed], targets: Sequence[Borrowed], total_bytes: int, leases: str
    ) -> Sequence[Pair]:
        here, there = ([extent.nbytes for extent in extents] for extents in (sources, targets))
        try:
            return chunks.pairs(here, there, total_bytes, _BETWEEN * self._chunk_bytes)
        except ValueError as error:
            raise Unmet(f"lease {leases}: {error}") from None

    async def _copy(
        self,
        move: Callable[[Callable[[Any], None]], None],
        direction: str,
        each: Callable[[Any], None] = lambda part: None,
    ) -> AsyncGenerator[int, None]:
        """Runs `move` in a thread and yields the bytes done, as they grow. `each` is called there with every part of
        the plan."""

        def work(moved: Moved) -> None:
            def told(part: Work) -> None:
                each(part)
                COPIED.labels(direction).inc(part.nbytes)
                moved(part.nbytes)

            move(told)

        try:
            async with aclosing(counted(work, self._threads)) as steps:
                async for done in steps:
                    yield done
        except OSError as error:
            raise Unavailable(f"the copy failed: {error.strerror or error}") from None


class _Seen:
    """The checksum of an image, computed in the copying thread while the bytes are warm."""

    def __init__(self, weights: memoryview) -> None:
        self._weights = weights
        self.checksum = Checksum()

    def add(self, chunk: Chunk) -> None:
        with self._weights[chunk.at : chunk.at + chunk.nbytes] as part:
            self.checksum.add(chunk.at, part)


def _agree(model: str, theirs: str, ours: str) -> None:
    if theirs and theirs != ours:
        raise Unmet(f"the weights of {model} have checksum {ours}, their engine said {theirs}")
