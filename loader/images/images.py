"""The images of a node: which there are, what they take, and that the keeper holds each before it may be relied on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from balloond.keeper.client import KeeperClient, Kept
from loader.images import image_memory
from loader.images.image_memory import Image
from loader.policy import image_eviction
from protos import keeper_pb2
from services.errors import Refused, Unavailable
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
Key = tuple[str, int]
"""(model, rank) of an image."""


class Images:
    """All images. `now` is in seconds on any clock; `describe` says of a model whether it is pinned and which
    generation is the present one (None: it is not in the catalogue); `on_change` is called after each change,
    `on_publish` with every new image, `before_freeing` in a thread, with the weights of an image that is not used any
    more."""

    def __init__(
        self,
        keeper: KeeperClient,
        capacity_bytes: int,
        now: Callable[[], float],
        describe: Callable[[str], tuple[bool, int | None]],
        on_change: Callable[[], None],
        before_freeing: Callable[[memoryview], None] = lambda weights: None,
        on_publish: Callable[[Image], None] = lambda image: None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._keeper = keeper
        self._now = now
        self._describe = describe
        self._on_change = on_change
        self._before_freeing = before_freeing
        self._on_publish = on_publish
        self._images: dict[Key, Image] = {}
        self._arriving: dict[Key, Image] = {}
        """Images that are filled and on the way to the keeper."""
        self._others: set[Image] = set()
        """Images that are being filled, or were dropped while a copy still reads them: they count, and cannot be
        found."""

    # --- looking

    def get(self, model: str, rank: int = 0) -> Image | None:
        return self._images.get((model, rank))

    def all(self) -> Sequence[Image]:
        return list(self._images.values())

    def parts(self, model: str) -> Sequence[Image]:
        """The parts of the model's image that there are, by rank."""
        return sorted((image for image in self._images.values() if image.model == model), key=lambda image: image.rank)

    @property
    def used_bytes(self) -> int:
        return sum(image.held_bytes for image in {*self._images.values(), *self._others})

    # --- making

    @contextlib.contextmanager
    def blank(self, model: str, generation: int, total_bytes: int, manifest: bytes, rank: int = 0) -> Iterator[Image]:
        """An image to be filled, which is gone at the end unless it was published. Others are dropped for it where the
        policy says so. Raises Refused when host memory is short, with the arithmetic."""
        self._make_room((model, rank), generation, image_memory.held_bytes(total_bytes, manifest))
        try:
            image = image_memory.create(model, generation, total_bytes, manifest, rank)
        except OSError as error:
            raise Refused(f"no host memory for an image of {total_bytes} bytes: {error.strerror}") from None
        self._others.add(image)
        try:
            yield image
        finally:
            self._others.discard(image)
            if self._images.get((model, rank)) is not image:
                self._free(image)
            self._on_change()

    def _make_room(self, key: Key, generation: int, need: int) -> None:
        model = key[0]
        by_model: dict[str, list[Image]] = {}
        for image in self._images.values():
            by_model.setdefault(image.model, []).append(image)
        # The other ranks' parts of the same image stay.
        own = by_model.pop(model, [])
        superseded = [image for image in own if _key(image) == key or image.generation != generation]
        held = [self._as_held(parts) for parts in by_model.values()]
        if superseded:
            held.append(self._as_held(superseded, superseded=True))
        taken = sum(image.held_bytes for image in {*self._others, *own}.difference(superseded))
        room = image_eviction.make_room(held, taken, need, self.capacity_bytes)
        if room.short_bytes:
            raise Refused(
                f"an image of {model} takes {need} bytes; of {self.capacity_bytes} for images {self.used_bytes} are"
                f" used, and what may be dropped leaves {room.short_bytes} short"
            )
        for other in room.drop:
            _log.info("image dropped for another", model=other, by=model)
            self._drop(superseded if other == model else self.parts(other))

    def _as_held(self, parts: Sequence[Image], superseded: bool = False) -> image_eviction.ImageFacts:
        """Facts of an image with all its parts, which are of use together only."""
        model = parts[0].model
        pinned, generation = self._describe(model)
        return image_eviction.ImageFacts(
            name=model,
            nbytes=sum(part.held_bytes for part in parts),
            last_used=max(part.last_used for part in parts),
            pinned=pinned,
            wanted=not superseded and all(part.generation == generation for part in parts),
            in_use=any(part.users > 0 for part in parts),
        )

    async def publish_within(self, timeout_s: float, image: Image, checksum: str) -> None:
        """Publishes an image as `publish` does. Raises Unavailable when the keeper does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.publish(image, checksum)
        except TimeoutError:
            raise Unavailable("the keeper does not answer, and no image is used that it does not hold") from None

    async def publish(self, image: Image, checksum: str) -> None:
        """Publishes an image that is filled: returns once the keeper holds it, in place of an older one of its model,
        whose other parts are of no use any more. Waits for a keeper that is away."""
        image.checksum = checksum
        image.last_used = self._now()
        key = _key(image)
        self._arriving[key] = image
        try:
            await self._keeper.keep([_kept(image)])
        except BaseException:
            del self._arriving[key]
            self._keeper.forget_soon([image_memory.record_id(*key)])
            if (older := self._images.get(key)) is not None:
                self._keeper.keep_soon([_kept(older)])
            raise
        del self._arriving[key]
        older = self._images.get(key)  # the older one may have been dropped meanwhile
        self._images[key] = image
        self._others.discard(image)
        if older is not None:
            self._let_go(older)
        self._drop([part for part in self.parts(image.model) if part.generation != image.generation])
        self._on_change()
        self._on_publish(image)

    # --- using

    @contextlib.contextmanager
    def using(self, image: Image) -> Iterator[memoryview]:
        """The image's bytes, which stay while the context lasts, whatever is dropped."""
        image.users += 1
        image.last_used = self._now()
        try:
            with image.weights() as weights:
                yield weights
        finally:
            image.users -= 1
            if image.users == 0 and image in self._others:
                self._others.discard(image)
                self._free(image)
                self._on_change()

    def touch(self, image: Image) -> None:
        """Marks an image as used because its model came up, from somewhere else: it is as useful as if it had been
        read."""
        image.last_used = self._now()

    # --- dropping

    def drop(self, model: str) -> None:
        """Frees the memory of a model's image, if there is one, at once or when the copies that read it end."""
        self._drop(self.parts(model))

    def _drop(self, images: Sequence[Image]) -> None:
        for image in images:
            del self._images[_key(image)]
            if _key(image) not in self._arriving:  # an arriving image's record has the same name
                self._keeper.forget_soon([image_memory.record_id(*_key(image))])
            self._let_go(image)
            self._on_change()

    def _let_go(self, image: Image) -> None:
        if image.users:
            self._others.add(image)
        else:
            self._free(image)

    def _free(self, image: Image) -> None:
        """Frees an image's memory in a thread: the kernel takes a second to free 16 GB, and the last one to let go
        waits for it."""

        def free() -> None:
            try:
                with image.weights() as weights:
                    self._before_freeing(weights)
            finally:
                image.close()

        tasks.spawn(asyncio.to_thread(free), f"free the image of {image.model}")

    # --- the keeper

    def restore(self, found: Iterable[tuple[keeper_pb2.Record, int]]) -> None:
        """Takes over the images that a predecessor kept, before anything else; what cannot be understood is
        forgotten."""
        for record, fd in found:
            try:
                image = image_memory.restore(record, fd)
            except ValueError as error:
                _log.warning("image not understood, forgotten", record=record.id, why=str(error))
                if fd >= 0:
                    os.close(fd)
                self._keeper.forget_soon([record.id])
                continue
            self._images[_key(image)] = image
        self._on_change()

    def everything(self) -> Iterable[Kept]:
        """Records of all images with their descriptors, for a keeper that came back empty."""
        return [_kept(image) for image in {**self._images, **self._arriving}.values()]


def _key(image: Image) -> Key:
    return image.model, image.rank


def _kept(image: Image) -> Kept:
    return image_memory.record(image), image.fd
