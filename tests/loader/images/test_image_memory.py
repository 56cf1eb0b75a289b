"""An image's memory describes itself to the loader's successor."""

import json
import mmap
import os

import pytest

from loader.images import image_memory
from protos import keeper_pb2

MANIFEST = b"what lies where" * 20_000
"""Longer than a datagram."""


@pytest.fixture
def image():
    image = image_memory.create("org/m", 5, 10_000, MANIFEST)
    with image.weights() as weights:
        weights[:] = bytes(range(250)) * 40
    image.checksum = "rows:01234567"
    yield image
    image.close()


def test_an_image_comes_back_from_its_record_and_descriptor(image):
    record = keeper_pb2.Record.FromString(image_memory.record(image).SerializeToString())
    assert len(record.SerializeToString()) < 1000
    again = image_memory.restore(record, os.dup(image.fd))
    image.close()
    assert (again.model, again.generation, again.total_bytes) == ("org/m", 5, 10_000)
    assert (again.manifest, again.checksum) == (MANIFEST, "rows:01234567")
    with again.weights() as weights:
        assert weights == bytes(range(250)) * 40
    again.close()


def test_image_memory_takes_whole_pages_of_weights_and_manifest(image):
    assert os.fstat(image.fd).st_size == image.held_bytes
    assert image.held_bytes % mmap.PAGESIZE == 0
    assert image.held_bytes >= 10_000 + len(MANIFEST)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda facts: facts.update(format=2), id="another version's format"),
        pytest.param(lambda facts: facts.update(total_bytes=100_000), id="another size"),
        pytest.param(lambda facts: facts.pop("checksum"), id="a fact missing"),
        pytest.param(lambda facts: facts.update(manifest_bytes=None), id="a fact of another type"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_and_the_descriptor_left(image, change):
    record = image_memory.record(image)
    facts = json.loads(record.detail)
    change(facts)
    record.detail = json.dumps(facts).encode()
    with pytest.raises(ValueError):
        image_memory.restore(record, image.fd)
    os.fstat(image.fd)


def test_a_record_without_a_descriptor_is_refused(image):
    with pytest.raises(ValueError, match="its memory is not"):
        image_memory.restore(image_memory.record(image), -1)
