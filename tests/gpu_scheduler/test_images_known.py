"""Which images a group knows of, from the loader's catalogue."""

from gpu_scheduler.observe import follow_loader
from gpu_scheduler.residents import Residents
from protos import common_pb2, loader_pb2


class Loader:
    """Tells one catalogue, is lost, and has nothing more to say."""

    def __init__(self, *entries):
        self.catalogue = loader_pb2.Catalogue(entries=entries)

    async def watch(self):
        yield self.catalogue
        yield None


def entry(name, **keys):
    return loader_pb2.Entry(model=common_pb2.ModelSpec(name=name, generation=1), **keys)


async def test_images_in_memory_and_on_disk_are_known_by_their_checksums_and_stay_so_while_the_loader_is_away():
    loader = Loader(
        entry("here", has_image=True, image_checksum="rows:1"),
        entry("stored", on_disk=True, image_checksum="rows:2", other_checksums=["rows:3"]),
        entry("neither"),
    )
    images = {"gone": ["rows:4"]}
    generations = {"gone": 5}
    await follow_loader(loader, images, generations)
    assert generations == {"here": 1, "stored": 1, "neither": 1}
    assert images == {"here": ["rows:1"], "stored": ["rows:2", "rows:3"]}


def test_a_checkpoint_has_the_generation_that_it_has_on_this_node():
    residents = Residents(lambda resident: None)
    told = common_pb2.ModelSpec(name="m", generation=7, path="/m")
    assert residents.of_this_node(told) is told, "nothing else is known"
    residents.generations["m"] = 9
    here = residents.of_this_node(told)
    assert (here.generation, here.path, told.generation) == (9, "/m", 7)
