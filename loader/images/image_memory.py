"""The memory of one image: a memfd that describes itself, and its record for the keeper.

    [0, total_bytes)              the weights range, byte for byte
    next multiple of a page       the manifest

The manifest lies in the memory and not in the record because a record must fit one datagram, and a model of thousands
of tensors has a manifest that does not.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass

from loader.keeping import OWNER
from protos import keeper_pb2

KIND = "image"
_FORMAT = 1


@dataclass(eq=False)
class Image:
    """One model's weights in host memory, or one rank's part of them, mapped here for as long as the object lives."""

    model: str
    generation: int
    total_bytes: int
    """Bytes of the weights range."""
    manifest: bytes
    checksum: str
    """Checksum of the weights range; empty while the image is being filled."""
    fd: int
    memory: mmap.mmap
    rank: int = 0
    users: int = 0
    """Number of copies that read it now."""
    last_used: float = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory that it takes, the manifest included."""
        return held_bytes(self.total_bytes, self.manifest)

    @contextlib.contextmanager
    def weights(self) -> Iterator[memoryview]:
        """The bytes of the weights range."""
        with memoryview(self.memory) as whole, whole[: self.total_bytes] as weights:
            yield weights

    @contextlib.contextmanager
    def pages(self) -> Iterator[memoryview]:
        """The weights range with the rest of its last page."""
        with memoryview(self.memory) as whole, whole[: _whole_pages(self.total_bytes)] as pages:
            yield pages

    def close(self) -> None:
        """Gives the memory up as far as it is ours; safe to repeat."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            # A view that is still in use keeps the mapping until it goes.
            with contextlib.suppress(BufferError):
                self.memory.close()


def held_bytes(total_bytes: int, manifest: bytes) -> int:
    """Bytes of host memory that an image takes."""
    return _whole_pages(total_bytes) + _whole_pages(len(manifest))


def create(model: str, generation: int, total_bytes: int, manifest: bytes, rank: int = 0) -> Image:
    """An empty image; its pages are taken as they are filled. Raises OSError."""
    size = held_bytes(total_bytes, manifest)
    fd = os.memfd_create(f"prism-image-{model[:200]}")
    try:
        os.ftruncate(fd, size)
        memory = mmap.mmap(fd, size)
    except OSError:
        os.close(fd)
        raise
    start = _whole_pages(total_bytes)
    memory[start : start + len(manifest)] = manifest
    return Image(model, generation, total_bytes, manifest, "", fd, memory, rank)


def record_id(model: str, rank: int) -> str:
    """Id of an image's record. No name of a model has the sign that sets a rank off."""
    return f"{KIND}/{model}#{rank}" if rank else f"{KIND}/{model}"


def record(image: Image) -> keeper_pb2.Record:
    """The keeper's record of a filled image."""
    facts = {
        "format": _FORMAT,
        "model": image.model,
        "rank": image.rank,
        "generation": image.generation,
        "total_bytes": image.total_bytes,
        "manifest_bytes": len(image.manifest),
        "checksum": image.checksum,
    }
    return keeper_pb2.Record(
        id=record_id(image.model, image.rank),
        owner=OWNER,
        bytes=image.held_bytes,
        kind=KIND,
        detail=json.dumps(facts).encode(),
        has_descriptor=True,
    )


def restore(kept: keeper_pb2.Record, fd: int) -> Image:
    """The image that a predecessor kept; the descriptor becomes the image's. Raises ValueError for what is no image, or
    one of another version's making: then the descriptor stays the caller's."""
    try:
        facts = json.loads(kept.detail)
        if facts["format"] != _FORMAT:
            raise ValueError(f"format {facts['format']}")
        total, length = int(facts["total_bytes"]), int(facts["manifest_bytes"])
        start = _whole_pages(total)
        size = start + _whole_pages(length)
        if fd < 0 or os.fstat(fd).st_size != size:
            raise ValueError(f"its memory is not the {size} bytes that it should be")
        memory = mmap.mmap(fd, size)
        manifest = memory[start : start + length]
        model, generation, rank = facts["model"], int(facts["generation"]), int(facts.get("rank", 0))
        return Image(model, generation, total, manifest, facts["checksum"], fd, memory, rank)
    except (KeyError, TypeError, OSError) as error:
        raise ValueError(f"{kept.id}: {error!r}") from None


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
