"""Copies between an image and memfd extents."""

import os

import pytest

from loader.copies.threads import Stopped
from loader.policy.chunks import pairs, plan
from loader.transfers.base import Borrowed
from loader.transfers.cpu import CpuTransfer
from services.errors import Unmet


@pytest.fixture
def made():
    made = []
    yield made
    for extent in made:
        os.close(extent.fd)


def of_sizes(made, sizes, device="cpu:0"):
    extents = []
    for number, size in enumerate(sizes):
        fd = os.memfd_create("extent")
        os.write(fd, bytes((7 * number + index) % 256 for index in range(size)))
        extents.append(Borrowed(number, size, fd, device))
    made += extents
    return extents


@pytest.fixture
def extents(made):
    return of_sizes(made, (4096, 8192, 4096))


def content(extents):
    return b"".join(os.pread(extent.fd, extent.nbytes, 0) for extent in extents)


def steps(extents, total, chunk_bytes=1000):
    return plan([extent.nbytes for extent in extents], total, chunk_bytes)


def test_image_copied_out_is_the_extents_back_to_back(extents):
    image, seen = bytearray(15000), []
    with memoryview(image) as view:
        CpuTransfer().out_of(extents, view, steps(extents, 15000), seen.append)
    assert image == content(extents)[:15000]
    assert sum(chunk.nbytes for chunk in seen) == 15000


def test_extents_copied_into_are_the_image_and_their_padding_is_left_alone(extents):
    before = content(extents)
    image = os.urandom(15000)
    CpuTransfer().into(extents, memoryview(image), steps(extents, 15000), lambda chunk: None)
    assert content(extents) == image + before[15000:]


@pytest.mark.parametrize("direction", ["out_of", "into"])
def test_cancelled_copy_changes_nothing_after_its_chunk(extents, direction):
    def stop(chunk):
        raise Stopped

    image = bytearray(16384)
    before = content(extents)
    with memoryview(image) as view, pytest.raises(Stopped):
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


@pytest.mark.parametrize("links", [("cpu:0",), ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1", "cpu:2", "cpu:3")])
def test_several_links_fill_and_read_the_same_extents(extents, links):
    transfer = CpuTransfer(links)
    content_before, seen = content(extents), []
    image, back = os.urandom(15000), bytearray(15000)
    transfer.into(extents, memoryview(image), steps(extents, 15000, chunk_bytes=100), seen.append)
    assert sorted(seen, key=lambda chunk: chunk.at) == list(steps(extents, 15000, chunk_bytes=100))
    assert content(extents) == image + content_before[15000:]
    with memoryview(back) as view:
        transfer.out_of(extents, view, steps(extents, 15000, chunk_bytes=100), lambda chunk: None)
    assert back == image


@pytest.mark.parametrize("links", [("cpu:0",), ("cpu:0", "cpu:1")])
def test_extents_are_copied_to_extents_of_other_sizes(made, extents, links):
    targets = of_sizes(made, (5000, 5000, 5000, 5000), "cpu:1")
    before = content(targets)
    plan = pairs([extent.nbytes for extent in extents], [extent.nbytes for extent in targets], 15000, 1000)
    seen = []
    CpuTransfer(links).between(extents, targets, plan, seen.append)
    assert content(targets) == content(extents)[:15000] + before[15000:]
    assert sorted(seen, key=lambda pair: pair.source.at) == list(plan)


def test_copy_from_host_memory_extents_to_a_gpu_is_refused(made, extents):
    targets = of_sizes(made, (16384,), "cuda:0")
    with pytest.raises(Unmet, match="there is no way from cpu:0 to cuda:0"):
        CpuTransfer().between(extents, targets, pairs([16384], [16384], 15000, 1000), lambda pair: None)


@pytest.mark.parametrize("short", [0, 1])
def test_extents_shorter_than_granted_are_an_error_on_either_side(made, extents, short):
    targets = of_sizes(made, (16384,))
    os.ftruncate((extents, targets)[short][0].fd, 100)
    before = content(targets)
    with pytest.raises(OSError, match="extent 0 has 100 bytes"):
        CpuTransfer().between(extents, targets, pairs([4096, 8192, 4096], [16384], 15000, 1000), lambda pair: None)
    assert content(targets) == before


def test_an_extent_that_shrinks_during_a_copy_over_two_links_ends_it(extents):
    def shrink(chunk):
        os.ftruncate(extents[2].fd, 0)

    image = bytearray(16384)
    with memoryview(image) as view, pytest.raises(OSError, match="extent 2 ended at"):
        CpuTransfer(("cpu:0", "cpu:1")).out_of(extents, view, steps(extents, 16384, chunk_bytes=100), shrink)
