"""Which images a group knows of, from the loader's catalogue."""

from gpu_scheduler.observe import follow_loader
from protos import common_pb2, loader_pb2


class Loader:
    """Tells one catalogue, is lost, and has nothing more to say."""

    def __init__(self, *entries):
        self.catalogue = loader_pb2.Catalogue(entries=entries)

    async def watch(self):
        yield self.catalogue
        yield None


def entry(name, **keys):
    return loader_pb2.Entry(model=common_pb2.ModelSpec(name=name), **keys)


async def test_images_in_memory_and_on_disk_are_known_by_their_checksums_and_stay_so_while_the_loader_is_away():
    loader = Loader(
        entry("here", has_image=True, image_checksum="rows:1"),
        entry("stored", on_disk=True, image_checksum="rows:2", other_checksums=["rows:3"]),
        entry("neither"),
    )
    images = {"gone": ["rows:4"]}
    await follow_loader(loader, images)
    assert images == {"here": ["rows:1"], "stored": ["rows:2", "rows:3"]}
