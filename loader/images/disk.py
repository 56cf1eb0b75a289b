"""Images on local disk: written once they are published, read back when host memory has none.

A disk is a cache of what the checkpoints say: whatever fails here costs a line in the log, and the engine reads the
checkpoint as if there were no disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from loader import metrics
from loader.copies.threads import Moved, Stopped, counted
from loader.images import disk_file
from loader.images.disk_file import SUFFIX, UNFINISHED, Damaged, Header
from loader.images.image_memory import Image, held_bytes
from loader.images.images import Images
from loader.policy import image_eviction
from services.errors import Unmet
from services.runtime import tasks
from services.runtime.pauses import Pauses
from services.telemetry import log

_log = log.get(__name__)
_THREADS = 4
"""Threads that read or write one file: what a local disk needs to be busy."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
"""Seconds before an image that could not be written is written again, at first and at most: others may leave, and a
disk may be emptied."""
_PASSING = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT)
)
"""Errors of a file that cannot be read which say nothing of what is in it."""


@dataclass(frozen=True)
class StoredImage:
    """One rank's part of an image, in a file."""

    path: Path
    generation: int
    rank: int
    total_bytes: int
    checksum: str
    key: str
    file_bytes: int
    held_bytes: int
    """Bytes of host memory that it takes once it is read."""
    last_used: float
    """Time when the file was written or read last; kept as its time of change, for the successors of this process."""


class DiskImages:
    """All images in `folder`; without one there are none, ever. `describe` returns for a generation of a checkpoint's
    files whether a model that has it is pinned, and whether there is such a model at all; `on_change` is called after
    each change."""

    def __init__(
        self,
        folder: str,
        capacity_bytes: int,
        images: Images,
        describe: Callable[[int], tuple[bool, bool]],
        on_change: Callable[[], None],
        *,
        threads: int = _THREADS,
        answer_timeout_s: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._folder = Path(folder) if folder else None
        self._capacity_bytes = capacity_bytes
        self._images = images
        self._describe = describe
        self._on_change = on_change
        self._threads = threads
        self._answer_timeout_s = answer_timeout_s
        self._stored: dict[str, StoredImage] = {}
        self._writing = asyncio.Lock()
        self._sleep = sleep
        self._pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    # --- looking

    def parts(self, generation: int) -> Sequence[StoredImage]:
        """The parts of an image that there are, by rank."""
        return sorted((one for one in self._stored.values() if one.generation == generation), key=lambda one: one.rank)

    def find(self, generation: int, manifest: bytes, rank: int) -> StoredImage | None:
        """The part that an engine can use which lays its weights out as `manifest` says; None if there is none, or host
        memory cannot hold the image."""
        stored = self._stored.get(Header(generation, rank, 0, "", manifest).key)
        return stored if self._fits(generation) else None

    def offered(self, generation: int) -> Sequence[StoredImage]:
        """Parts of an image by rank; none where they never fit into the host memory that there is for images."""
        return self.parts(generation) if self._fits(generation) else ()

    def _fits(self, generation: int) -> bool:
        return sum(part.held_bytes for part in self.parts(generation)) <= self._images.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return sum(one.file_bytes for one in self._stored.values())

    # --- starting

    async def start(self) -> None:
        """Takes over what a predecessor left: whole files are images, unfinished and damaged ones go. Raises OSError
        when the folder cannot be used."""
        if self._folder is None:
            return
        found = await asyncio.to_thread(_scan, self._folder)
        self._stored = {one.key: one for one in found}
        await self._make_room(0, (), over_pinned=True)
        for generation in {one.generation for one in self._stored.values()}:
            if not self._fits(generation):
                _log.warning(
                    "image on disk not offered: host memory for images cannot hold it",
                    file=self.parts(generation)[0].path.name,
                    bytes=sum(part.held_bytes for part in self.parts(generation)),
                    host_capacity_bytes=self._images.capacity_bytes,
                )
        self._on_change()

    # --- writing

    def write_soon(self, image: Image) -> None:
        """Has a published image written, behind those that wait already. That holds up nothing else: an image that is
        dropped meanwhile is not written."""
        if self._folder is not None:
            tasks.spawn(self._write(image, self._folder), f"write the image of {image.model}")

    async def _write(self, image: Image, folder: Path) -> None:
        async with self._writing:
            header = Header(image.generation, image.rank, image.total_bytes, image.checksum, image.manifest)
            if header.key in self._stored or not self._is_there(image):
                return
            older = [one for one in self.parts(image.generation) if one.rank == image.rank]
            await self._remove(older, "replaced")
            if not await self._has_room(image, header):
                self._write_later(image, header)
                return
            path = folder / f"{header.key}{SUFFIX}"
            try:
                await self._write_file(image, header, path)
                stored = await asyncio.to_thread(_stored, path, header)
                if not self._is_there(image):  # dropped since its last block was written
                    await asyncio.to_thread(path.unlink, missing_ok=True)
                    raise Stopped
            except OSError as error:
                _log.warning("image not written to disk", model=image.model, why=error.strerror or str(error))
                self._write_later(image, header)
            except Stopped:
                _log.info("image dropped while it was written to disk", model=image.model)
            else:
                self._stored[header.key] = stored
                self._pauses.forget(header.key)
                _log.info("image written to disk", model=image.model, rank=image.rank, bytes=stored.file_bytes)
                self._on_change()

    def _write_later(self, image: Image, header: Header) -> None:
        pause_s = self._pauses.failed(header.key)

        async def write() -> None:
            await self._sleep(pause_s)
            if self._is_there(image):
                self.write_soon(image)
            else:
                self._pauses.forget(header.key)

        tasks.spawn(write(), f"write the image of {image.model} later")

    async def _write_file(self, image: Image, header: Header, path: Path) -> None:
        with image.pages() as pages:

            def work(moved: Moved) -> None:
                def while_there(nbytes: int) -> None:
                    if not self._is_there(image):
                        raise Stopped
                    metrics.DISK_MOVED.labels("write").inc(nbytes)
                    moved(nbytes)

                disk_file.write(path, header, pages, self._threads, while_there)

            async with aclosing(counted(work)) as steps:
                async for _ in steps:
                    pass

    def _is_there(self, image: Image) -> bool:
        return self._images.get(image.model, image.rank) is image

    async def _has_room(self, image: Image, header: Header) -> bool:
        pinned, _ = self._describe(image.generation)
        own = self.parts(image.generation)
        short = await self._make_room(header.file_bytes, own, over_pinned=pinned)
        if short:
            _log.warning("no room on disk for an image", model=image.model, bytes=header.file_bytes, short_bytes=short)
        return not short

    async def _make_room(self, need: int, own: Sequence[StoredImage], over_pinned: bool) -> int:
        """Removes images that give way for `need` bytes beside `own`. Returns how many bytes are short in spite of it;
        unless that is 0, nothing was removed."""
        others = {one.generation for one in self._stored.values()} - {one.generation for one in own}
        room = image_eviction.make_room(
            [self._as_held(generation) for generation in others],
            sum(one.file_bytes for one in own),
            need,
            self._capacity_bytes,
            over_pinned,
        )
        await self._remove([one for one in self._stored.values() if _name(one.generation) in room.drop], "for another")
        return room.short_bytes

    def _as_held(self, generation: int) -> image_eviction.ImageFacts:
        """Facts of an image with all its parts, which are of use together only."""
        parts = self.parts(generation)
        pinned, wanted = self._describe(generation)
        return image_eviction.ImageFacts(
            name=_name(generation),
            nbytes=sum(part.file_bytes for part in parts),
            last_used=max(part.last_used for part in parts),
            pinned=pinned,
            wanted=wanted and self._fits(generation),
        )

    # --- reading

    async def read(self, model: str, stored: StoredImage) -> AsyncGenerator[int | Image, None]:
        """Makes an image in host memory out of a file, which the keeper holds by the end. Yields the bytes read; ends
        with the image.

        Raises Unmet when the file is damaged, and then removed, or cannot be read now; Refused when host memory
        is short, Unavailable when the keeper does not take the image in time."""
        try:
            header = await asyncio.to_thread(disk_file.read_header, stored.path)
            with self._images.blank(
                model, header.generation, header.total_bytes, header.manifest, header.rank
            ) as image:
                with image.pages() as pages:

                    def work(moved: Moved) -> None:
                        def counting(nbytes: int) -> None:
                            metrics.DISK_MOVED.labels("read").inc(nbytes)
                            moved(nbytes)

                        disk_file.read(stored.path, header, pages, self._threads, counting)

                    async with aclosing(counted(work)) as steps:
                        async for done in steps:
                            yield min(done, header.total_bytes)
                await self._images.publish_within(self._answer_timeout_s, image, header.checksum)
        except (Damaged, OSError) as error:
            why = str(error) if isinstance(error, Damaged) else error.strerror
            if isinstance(error, OSError) and error.errno in _PASSING:
                _log.warning("image on disk cannot be read now", model=model, file=stored.path.name, why=why)
                raise Unmet(f"the image of {model} on disk cannot be read now: {why}") from None
            _log.warning("image on disk not used and removed", model=model, file=stored.path.name, why=why)
            await self._remove([stored], "damaged")
            raise Unmet(f"the image of {model} on disk cannot be used: {why}") from None
        _log.info("image read from disk", model=model, bytes=image.total_bytes)
        await self.used(header.generation, header.rank)
        yield image

    async def used(self, generation: int, rank: int) -> None:
        """Marks an image as used because an engine was given it, from here or from memory: others give way before
        it."""
        for one in self.parts(generation):
            if one.rank == rank:
                now = await asyncio.to_thread(_touch, one.path)
                if one.key in self._stored:
                    self._stored[one.key] = replace(one, last_used=now)

    # --- removing

    async def drop(self, generation: int) -> None:
        """Removes the files of an image, if there are any."""
        await self._remove(self.parts(generation), "requested")

    async def _remove(self, files: Sequence[StoredImage], why: str) -> None:
        """Removes files and forgets their images. A file that cannot be removed is of no use either: the next start
        looks at it again."""
        for one in files:
            if self._stored.pop(one.key, None) is not None:
                _log.info("image removed from disk", file=one.path.name, bytes=one.file_bytes, why=why)
                self._on_change()
            try:
                await asyncio.to_thread(one.path.unlink, missing_ok=True)
            except OSError as error:
                _log.warning("file stays on disk", file=one.path.name, why=error.strerror)


def _scan(folder: Path) -> Iterable[StoredImage]:
    """The images of a folder. Files that are no images and would be in the way are removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(f"*{SUFFIX}{UNFINISHED}"):
        _log.info("unfinished image removed from disk", file=unfinished.name)
        unfinished.unlink()
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            found.append(_stored(path, disk_file.read_header(path)))
        except (Damaged, OSError) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                _log.warning("image on disk cannot be read now", file=path.name, why=str(error))
                continue
            _log.warning("image on disk not used and removed", file=path.name, why=str(error))
            path.unlink(missing_ok=True)
    return found


def _stored(path: Path, header: Header) -> StoredImage:
    stat = path.stat()
    return StoredImage(
        path,
        header.generation,
        header.rank,
        header.total_bytes,
        header.checksum,
        header.key,
        stat.st_size,
        held_bytes(header.total_bytes, header.manifest),
        stat.st_mtime,
    )


def _touch(path: Path) -> float:
    """Sets the file's time of change to now and returns it; 0 if the file went meanwhile."""
    try:
        os.utime(path)
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _name(generation: int) -> str:
    return f"{generation:016x}"
