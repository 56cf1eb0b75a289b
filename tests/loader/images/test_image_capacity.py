"""Which models can have an image beside the others."""

from types import SimpleNamespace

import pytest

from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import CatalogueModel, Sizes
from loader.images.image_capacity import ImageCapacity
from services.errors import Refused

MIB = 1 << 20


class World:
    """Models by name with MiB of weights, of which some have an image."""

    def __init__(self, capacity_mib, pinned=(), images=(), devices=1, **weights_mib):
        sizes = Sizes(4, 1, 0)
        self.models = {
            name: CatalogueModel(
                CatalogueEntry(name=name, path="/m", devices=devices),
                sizes,
                SimpleNamespace(generation=7, context_tokens=0, held_bytes=lambda _context, nbytes=nbytes: nbytes),
            )
            for name, nbytes in ((name, mib * MIB // devices) for name, mib in weights_mib.items())
        }
        held = {
            name: [SimpleNamespace(generation=generation, held_bytes=mib * MIB)] for name, generation, mib in images
        }
        self.capacity = ImageCapacity(
            SimpleNamespace(all=lambda: list(self.models.values())),
            SimpleNamespace(capacity_bytes=capacity_mib * MIB, parts=lambda name: held.get(name, [])),
            lambda model: model.listed.name in pinned,
        )

    def why(self, name):
        return self.capacity.why_none(self.models[name])

    def pin(self, name):
        self.capacity.check_pin(self.models[name])


def test_weights_larger_than_the_memory_for_images_have_no_image():
    world = World(256, a=513, b=256)
    assert world.why("a") == "its weights take 513.0 MiB, all images together may take 256.0 MiB"
    assert world.why("b") == ""
    with pytest.raises(Refused, match="^a is not pinned, since it can have no image to stay: its weights take 513.0"):
        world.pin("a")
    world.pin("b")


def test_image_room_counts_the_parts_of_all_devices():
    assert World(256, devices=2, a=300).why("a") and not World(300, devices=2, a=300).why("a")


def test_image_room_is_reduced_by_pinned_images_and_not_by_others():
    images = [("big", 7, 200), ("other", 7, 50)]
    world = World(256, pinned={"big"}, images=images, big=200, other=50, a=60)
    assert world.why("a") == (
        "its weights take 60.0 MiB, all images together may take 256.0 MiB, 200.0 MiB of it for what is pinned (big)"
    )
    assert World(256, images=images, big=200, other=50, a=60).why("a") == ""
    assert World(256, pinned={"big"}, big=200, a=60).why("a") == "", "there is no image of it yet"


def test_model_with_an_image_has_room_for_it_whatever_the_capacity():
    world = World(100, images=[("a", 7, 120)], a=120)
    assert world.why("a") == ""
    assert World(100, images=[("a", 6, 120)], a=120).why("a"), "of other files"


def test_model_beyond_the_image_room_is_not_pinned_unless_it_already_is():
    world = World(256, pinned={"big", "huge"}, big=200, huge=1000, a=60, b=50)
    with pytest.raises(Refused, match=r"200.0 MiB of it for what is pinned \(big\)"):
        world.pin("a")
    world.pin("b")
    world.pin("huge")


def test_model_in_error_may_be_pinned():
    world = World(1, a=5)
    world.models["a"] = CatalogueModel(CatalogueEntry(name="a", path="/m"), Sizes(4, 1, 0), None, "broken")
    assert world.why("a") == ""
    world.pin("a")
