"""Which images give way when host memory, or the disk, is short for another.

Kept are, in this order: images under copy, pinned models' images, then the most recently used. An image that no engine
can request any more (of an older generation, or of a model that left the catalogue) goes first. Pinned images never
leave memory for another; on disk they do, last, for one that is pinned itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ImageFacts:
    """An image, as the decision sees it."""

    name: str
    """Name of its model, or whatever else tells it from the others."""
    nbytes: int
    last_used: float
    """Time of its last use in seconds on any clock."""
    pinned: bool = False
    wanted: bool = True
    """Whether it is of the present generation of a model in the catalogue."""
    in_use: bool = False


@dataclass(frozen=True)
class Room:
    """What has to happen for the bytes to fit."""

    drop: tuple[str, ...]
    """Names of the images that go; none when `short_bytes` is not 0: no image goes for nothing."""
    short_bytes: int
    """Bytes that lack even if all that may go went; 0: they fit once these are dropped."""


def make_room(
    held: Iterable[ImageFacts], taken_bytes: int, need_bytes: int, capacity_bytes: int, over_pinned: bool = False
) -> Room:
    """Images that give way for `need_bytes` beside the images `held` and `taken_bytes` of others that cannot go (images
    being made). `over_pinned`: pinned ones may go, after all others."""
    held = list(held)
    missing = sum(image.nbytes for image in held) + taken_bytes + need_bytes - capacity_bytes
    candidates = sorted(
        (image for image in held if not image.in_use and (over_pinned or not (image.pinned and image.wanted))),
        key=lambda image: (image.wanted, image.wanted and image.pinned, image.last_used, image.name),
    )
    chosen: list[ImageFacts] = []
    for image in candidates:
        if missing <= 0:
            break
        chosen.append(image)
        missing -= image.nbytes
    if missing > 0:
        return Room((), missing)
    # A large image late in the row may have made earlier ones unnecessary: those most worth keeping stay.
    for image in reversed(chosen[:]):
        if missing + image.nbytes <= 0:
            chosen.remove(image)
            missing += image.nbytes
    return Room(tuple(image.name for image in chosen), 0)
