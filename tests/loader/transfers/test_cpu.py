"""Copies between an image and memfd extents."""

import os

import pytest

from loader.policy.chunks import plan
from loader.transfers.base import Borrowed, Cancelled
from loader.transfers.cpu import CpuTransfer


@pytest.fixture
def extents():
    made = []
    for number, size in enumerate((4096, 8192, 4096)):
        fd = os.memfd_create("extent")
        os.write(fd, bytes((7 * number + index) % 256 for index in range(size)))
        made.append(Borrowed(number, size, fd, "cpu:0"))
    yield made
    for extent in made:
        os.close(extent.fd)


def content(extents):
    return b"".join(os.pread(extent.fd, extent.nbytes, 0) for extent in extents)


def steps(extents, total, chunk_bytes=1000):
    return plan([extent.nbytes for extent in extents], total, chunk_bytes)


def test_the_image_is_the_extents_back_to_back(extents):
    image, seen = bytearray(15000), []
    with memoryview(image) as view:
        CpuTransfer().out_of(extents, view, steps(extents, 15000), seen.append)
    assert image == content(extents)[:15000]
    assert sum(chunk.nbytes for chunk in seen) == 15000


def test_the_extents_are_the_image_and_their_padding_is_left_alone(extents):
    before = content(extents)
    image = os.urandom(15000)
    CpuTransfer().into(extents, memoryview(image), steps(extents, 15000), lambda chunk: None)
    assert content(extents) == image + before[15000:]


@pytest.mark.parametrize("direction", ["out_of", "into"])
def test_a_cancelled_copy_touches_nothing_after_its_chunk(extents, direction):
    def stop(chunk):
        raise Cancelled

    image = bytearray(16384)
    before = content(extents)
    with memoryview(image) as view, pytest.raises(Cancelled):
        getattr(CpuTransfer(), direction)(extents, view, steps(extents, 16384), stop)
    if direction == "out_of":
        assert image == before[:1000] + bytes(15384)
    else:
        assert content(extents) == bytes(1000) + before[1000:]


@pytest.mark.parametrize("direction", ["out_of", "into"])
def test_an_extent_shorter_than_granted_is_an_error_before_anything_is_copied(extents, direction):
    os.ftruncate(extents[2].fd, 4095)
    image = bytearray(16384)
    with memoryview(image) as view, pytest.raises(OSError, match="extent 2 has 4095 bytes where 4096 were granted"):
        getattr(CpuTransfer(), direction)(extents, view, steps(extents, 16384), lambda chunk: None)
    assert image == bytes(16384)
