"""Saving and loading images, and loading from another lease that holds the same: extents are borrowed, bytes copied in
a thread, what was mapped for that is taken away and extents are given back, whatever happens between.

A load yields its last step when the last byte has arrived, because an engine waits for that. It tidies up when the next
step is requested, and gives the extents back only then, because what is mapped here must not belong to another process
yet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from loader.catalogue.models import NodeModels
from loader.copies.handoff_client import HandoffClient
from loader.copies.threads import Moved, counted, finished
from loader.images.image_memory import Image
from loader.images.images import Images
from loader.metrics import COPIED, SECONDS
from loader.policy import chunks
from loader.policy.chunks import Chunk
from loader.policy.links import CopyWork
from loader.policy.sources import Content, LeaseSource, Sources
from loader.transfers.base import Borrowed, Tidy, Transfer
from services.errors import NotFound, PrismError, Unavailable, Unmet
from services.runtime.checksum import Checksum
from services.telemetry import log

_log = log.get(__name__)
_THREADS = 8
"""Copies that run at the same time; more wait for their turn. The ranks of a model, at most four, are loaded at once,
and beside them another model's may leave."""

_BETWEEN = 2
"""Factor by which chunks between two devices are larger, because these come several times as fast. Larger ones would
let extents wait that are mapped meanwhile."""
_Move = Callable[[Callable[[Any], None]], Tidy]
"""A copy of a transfer, to be called with the callback for parts that are done."""
Step = int | Image
"""A step of a copy under way: the bytes done so far, or in the end the image."""


@dataclass(frozen=True)
class LeaseArrival:
    """A step of a copy from another lease: `done` bytes of what that holds have come."""

    source: LeaseSource
    done: int


class ImageCopier:
    """Copies between images and leases. Several run at a time, each in a thread; a closed or cancelled iteration stops
    its copy and waits for the thread, so that nothing is given back that is still written to."""

    def __init__(
        self,
        models: NodeModels,
        images: Images,
        handoff: HandoffClient,
        transfer_for: Callable[[str], Transfer],
        has_way: Callable[[str, str], bool],
        *,
        chunk_bytes: int,
        threads: int = _THREADS,
        answer_timeout_s: float,
    ) -> None:
        """`transfer_for` returns the transfer of a device, by its name; `has_way` says whether there is a way from one
        device to another that is faster than from an image."""
        self._models = models
        self._images = images
        self._handoff = handoff
        self._transfer_for = transfer_for
        self._has_way = has_way
        self._sources = Sources()
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

        Raises NotFound (model, lease), Unmet when the checkpoint or its files are of another generation by now, the
        lease does not hold what the manifest says or the checksum differs, Refused when host memory is short,
        Unavailable while balloond or the keeper are away."""
        present = self._models.get(model).generation
        if generation != present:
            raise Unmet(f"{model} is of generation {present} by now, the engine's weights are of {generation}")
        # A second save of the same waits, and then finds the image.
        lock = self._saving.setdefault((model, rank), asyncio.Lock())
        async with lock:
            image = self._images.get(model, rank)
            if image is not None and (image.generation, image.manifest) == (generation, manifest):
                _agree(model, checksum, image.checksum)
                yield image
                return
            # If the files have changed, the engine may have read some of the old and some of the new.
            await self._models.check_unchanged(model)
            async with self._handoff.borrowed(lease_id) as extents:
                plan = self._plan(extents, total_bytes, lease_id)
                with self._images.blank(model, generation, total_bytes, manifest, rank) as image:
                    with image.weights() as weights:
                        seen = _Seen(weights)
                        transfer = self._transfer_for(extents[0].device)
                        move = partial(transfer.out_of, extents, weights, plan)
                        async with self._copy(move, "save", seen.add) as steps:
                            async for step in steps:
                                yield step
                    _agree(model, checksum, seen.checksum.text())
                    await self._images.publish_within(self._answer_timeout_s, image, seen.checksum.text())
                    self._filled(lease_id, extents, Content(model, generation, rank, manifest), image.checksum)
            _log.info("image saved", model=model, bytes=image.total_bytes, checksum=image.checksum)
            yield image

    async def load(
        self, model: str, generation: int, lease_id: str, manifest: bytes, total_bytes: int, rank: int = 0
    ) -> AsyncGenerator[Step, None]:
        """Copies the image of a model, or a rank's part of it, into a lease's weights. Ends with the image, when
        all has arrived and before it has tidied up.

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
                self._sources.forget(lease_id)
                transfer = self._transfer_for(extents[0].device)
                async with self._copy(partial(transfer.into, extents, weights, plan), "load") as steps:
                    async for step in steps:
                        yield step
                    content = Content(model, generation, rank, image.manifest)
                    self._filled(lease_id, extents, content, image.checksum)
                    yield image

    async def load_from_device(
        self, content: Content, lease_id: str, total_bytes: int, checksum: str = ""
    ) -> AsyncGenerator[LeaseArrival | LeaseSource, None]:
        """Copies the weights of another lease that holds the content into this one: that lease's engine may be serving
        from them. `checksum` is that of the content's image, where it is known. Ends, before it has tidied up, with the
        source that all of it came from, or without one when there is none, or none could be read to its end: then the
        lease's weights may hold anything.

        Raises Unmet when the lease is too small, NotFound when it is gone, Unavailable while balloond is away."""
        if all(source.lease_id == lease_id for source in self._sources.of(content, checksum)):
            return
        async with self._handoff.borrowed(lease_id) as targets:
            self._plan(targets, total_bytes, lease_id)
            # This comes before a source is chosen: a lease that waits for a source is none itself, so no two wait for
            # each other.
            self._sources.forget(lease_id)
            for source in self._sources.of(content, checksum):
                if not self._has_way(source.device, targets[0].device):
                    continue
                try:
                    async with self._between(source, targets, total_bytes) as steps:
                        async for step in steps:
                            yield LeaseArrival(source, step)
                        if source in self._sources:  # no engine doubted it meanwhile
                            self._filled(lease_id, targets, content, source.checksum)
                        yield source
                        return
                except PrismError as error:
                    gone = isinstance(error, (NotFound, Unmet))  # expected of a lease that ended or slept
                    (_log.info if gone else _log.warning)(
                        "weights do not come from another lease",
                        model=content.model,
                        source=source.lease_id,
                        device=source.device,
                        why=str(error),
                    )

    def doubt(self, content: Content) -> None:
        """Forgets all leases that hold `content`: what an engine got from one of them did not verify, so none is copied
        from until it was filled anew."""
        self._sources.doubt(content)

    # --- parts

    def _plan(self, extents: Sequence[Borrowed], total_bytes: int, lease_id: str) -> Sequence[Chunk]:
        try:
            return chunks.plan([extent.nbytes for extent in extents], total_bytes, self._chunk_bytes)
        except ValueError as error:
            raise Unmet(f"lease {lease_id}: {error}") from None

    @asynccontextmanager
    async def _between(
        self, source: LeaseSource, targets: Sequence[Borrowed], total_bytes: int
    ) -> AsyncIterator[AsyncIterator[int]]:
        """Copies from another lease as `_copy` does. Raises NotFound when the source's lease is gone, Unmet when it
        holds something else by now."""
        try:
            async with self._handoff.borrowed(source.lease_id) as sources:
                if source not in self._sources or source.extent_ids != _ids(sources):
                    raise Unmet(f"lease {source.lease_id} holds other weights by now")
                sizes, target_sizes = ([extent.nbytes for extent in extents] for extents in (sources, targets))
                plan = chunks.pairs(sizes, target_sizes, total_bytes, _BETWEEN * self._chunk_bytes)
                transfer = self._transfer_for(source.device)
                async with self._copy(partial(transfer.between, sources, targets, plan), "between") as steps:
                    yield steps
        except (NotFound, Unmet):
            if source in self._sources:
                self._sources.forget(source.lease_id)
            raise

    def _filled(self, lease_id: str, extents: Sequence[Borrowed], content: Content, checksum: str) -> None:
        self._sources.filled(LeaseSource(lease_id, extents[0].device, _ids(extents), content, checksum))

    @asynccontextmanager
    async def _copy(
        self,
        move: _Move,
        direction: str,
        each: Callable[[Any], None] = lambda part: None,
    ) -> AsyncIterator[AsyncIterator[int]]:
        """Runs `move` in a thread and gives an iterator over the bytes done, as they grow, to their end; tidies up when
        the context ends. `each` is called in the thread with every part of the plan."""
        copied = COPIED.labels(direction)
        left_to_do: list[Tidy] = []

        def work(moved: Moved) -> None:
            def told(part: CopyWork) -> None:
                each(part)
                copied.inc(part.nbytes)
                moved(part.nbytes)

            began = time.monotonic()
            left_to_do.append(move(told))
            SECONDS.labels(direction).observe(time.monotonic() - began)

        try:
            async with aclosing(counted(work, self._threads)) as steps:
                yield steps
        except OSError as error:
            raise Unavailable(f"the copy failed: {error.strerror or error}") from None
        finally:
            for tidy in left_to_do:
                await _tidied(tidy)


async def _tidied(tidy: Tidy) -> None:
    """Tidies up in a thread of its own: other copies wait for the threads that copy."""
    try:
        await finished(tidy)
    except OSError as error:
        _log.error("extents stay mapped after a copy", why=error.strerror or str(error))


def _ids(extents: Sequence[Borrowed]) -> tuple[int, ...]:
    return tuple(extent.id for extent in extents)


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
        raise Unmet(f"the weights of {model} have checksum {ours}, their engine computed {theirs}")
