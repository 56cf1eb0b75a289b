"""Jobs that callers request of images: saving, loading from wherever is fastest, reading from disk what host memory
lacks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from loader.catalogue.models import NodeModels
from loader.copies.jobs import JobProgress, Jobs, JobTarget, Result, Steps
from loader.images.copying import ImageCopier, LeaseArrival, Step
from loader.images.disk import DiskImages, StoredImage
from loader.images.image_memory import Image
from loader.images.images import Images
from loader.policy.sources import Content
from services.errors import Refused, Unavailable, Unmet

COPYING, READING = "copying", "reading from disk"
IMAGE = "image"
"""Source of a load whose bytes did not come from a device."""


class ImageJobs:
    """Jobs of images, as protos/loader.proto describes them. Every call is an iteration over the progress that ends
    with the result, and raises Conflict when a caller cancelled it."""

    def __init__(self, models: NodeModels, images: Images, disk: DiskImages, copying: ImageCopier, jobs: Jobs) -> None:
        self._models = models
        self._images = images
        self._disk = disk
        self._copying = copying
        self._jobs = jobs

    def save(self, what: JobTarget, total_bytes: int) -> Steps:
        """Saves an image. Raises what `ImageCopier.save` does."""
        return self._jobs.follow(
            what,
            lambda: _told(
                COPYING,
                total_bytes,
                self._copying.save(
                    what.model, what.generation, what.lease_id, what.manifest, total_bytes, what.checksum, what.rank
                ),
            ),
        )

    def load(self, what: JobTarget, total_bytes: int) -> Steps:
        """Loads an image. Raises what `ImageCopier.load` does."""
        return self._jobs.follow(what, lambda: self._load(what, total_bytes))

    async def _load(self, what: JobTarget, total_bytes: int) -> Steps:
        content = Content(what.model, what.generation, what.rank, what.manifest)
        image = self._in_memory(what)
        if what.image_only:
            self._copying.doubt(content)
        else:
            known = image or self._stored(what)
            checksum = "" if known is None else known.checksum
            arrived = False
            async with aclosing(self._from_device(content, what.lease_id, total_bytes, checksum)) as steps:
                async for step in steps:
                    yield step
                    arrived = isinstance(step, Result)
            if arrived:
                if image is not None:
                    self._images.touch(image)
                await self._disk.used(what.generation, what.rank)
                return
        if self._in_memory(what) is None and (stored := self._stored(what)) is not None:
            async with aclosing(self._read_for_load(what.model, stored)) as reading:
                async for at in reading:
                    yield at
        copy = self._copying.load(what.model, what.generation, what.lease_id, what.manifest, total_bytes, what.rank)
        async with aclosing(_told(COPYING, total_bytes, copy, IMAGE)) as steps:
            async for step in steps:
                yield step
        await self._disk.used(what.generation, what.rank)

    def _in_memory(self, what: JobTarget) -> Image | None:
        image = self._images.get(what.model, what.rank)
        fits = image is not None and (image.generation, image.manifest) == (what.generation, what.manifest)
        return image if fits else None

    def _stored(self, what: JobTarget) -> StoredImage | None:
        return self._disk.find(what.generation, what.manifest, what.rank)

    async def _from_device(self, content: Content, lease_id: str, total_bytes: int, checksum: str) -> Steps:
        """Loads from another lease; ends without a result when none could give it."""
        copy = self._copying.load_from_device(content, lease_id, total_bytes, checksum)
        async with aclosing(copy) as steps:
            async for step in steps:
                if isinstance(step, LeaseArrival):
                    yield JobProgress(f"{COPYING} from {step.source.device}", step.done, total_bytes)
                else:
                    yield JobProgress(f"{COPYING} from {step.device}", total_bytes, total_bytes)
                    yield Result(step.checksum, total_bytes, step.device)

    async def _read_for_load(self, model: str, stored: StoredImage) -> AsyncGenerator[JobProgress, None]:
        """Reads an image that a load needs. Raises Unmet for whatever goes wrong: the engine can still read the
        checkpoint."""
        async with aclosing(self._read(model, stored)) as steps:
            try:
                async for step in steps:
                    if isinstance(step, JobProgress):
                        yield step
            except (Refused, Unavailable) as error:
                raise Unmet(f"the image of {model} on disk is of no use now: {error}") from None

    def _read(self, model: str, stored: StoredImage) -> Steps:
        what = JobTarget("read", model, stored.generation, stored.rank)
        return self._jobs.follow(what, lambda: _told(READING, stored.total_bytes, self._disk.read(model, stored)))

    def prefetch(self, model: str) -> Steps:
        """Reads the parts of a model's image that host memory lacks and the disk has; nothing where it is on neither.
        Raises NotFound, Refused when host memory is short, Unavailable when the keeper does not answer."""
        generation = self._models.get(model).generation
        return self._jobs.follow(JobTarget("prefetch", model, generation), lambda: self._prefetch(model, generation))

    async def _prefetch(self, model: str, generation: int) -> Steps:
        here = {part.rank for part in self._images.parts(model) if part.generation == generation}
        missing = [stored for stored in self._disk.parts(generation) if stored.rank not in here]
        total, before = sum(stored.total_bytes for stored in missing), 0
        for stored in missing:
            try:
                async with aclosing(self._read(model, stored)) as steps:
                    async for step in steps:
                        if isinstance(step, JobProgress):
                            yield JobProgress(READING, before + step.done, total)
            except Unmet:
                continue  # said in the log; the first activation makes an image
            before += stored.total_bytes
        yield JobProgress(READING, total, total)


async def _told(step: str, total: int, steps: AsyncGenerator[Step, None], source: str = "") -> Steps:
    """The steps of a copy as progress of a job, which ends with all of the bytes, and its result."""
    async with aclosing(steps):
        async for told in steps:
            if isinstance(told, Image):
                yield JobProgress(step, total, total)
                yield Result(told.checksum, told.total_bytes, source)
            else:
                yield JobProgress(step, told, total)
