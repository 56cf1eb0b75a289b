"""Which images a group knows of, from the loader's catalogue."""

from gpu_scheduler.observe import follow_loader
from gpu_scheduler.residents import Residents
from protos import common_pb2, loader_pb2
from services.rpc.watch import Watched


class Loader:
    """Tells one catalogue, is lost, and has nothing more to say."""

    def __init__(self, *entries):
        self.catalogue = loader_pb2.Catalogue(entries=entries)

    async def watch(self):
        yield self.catalogue
        yield None


def entry(name, **keys):
    return loader_pb2.Entry(model=common_pb2.ModelSpec(name=name, generation=1), **keys)


async def test_images_are_known_by_their_checksums_and_stay_so_while_the_loader_is_away():
    loader = Loader(
        entry("here", has_image=True, image_checksum="rows:1", reading=5),
        entry("stored", on_disk=True, image_checksum="rows:2", other_checksums=["rows:3"]),
        entry("neither"),
        entry("broken", error="its folder does not exist", reading=6),
    )
    images = {"gone": ["rows:4"]}
    residents, read, changes = Residents(lambda resident: None), [], Watched(None)
    residents.listed["gone"] = common_pb2.ModelSpec(generation=5)
    await follow_loader(loader, images, residents, lambda: read.append(dict(residents.readings)), changes)
    listed = {name: spec.generation for name, spec in residents.listed.items()}
    assert listed == {"here": 1, "stored": 1, "neither": 1}
    assert read == [{"here": 5, "stored": 0, "neither": 0, "broken": 6}]
    assert changes.revision
    assert images == {"here": ["rows:1"], "stored": ["rows:2", "rows:3"]}


def test_a_checkpoint_has_the_generation_that_it_has_on_this_node():
    residents = Residents(lambda resident: None)
    told = common_pb2.ModelSpec(name="m", generation=7, path="/m")
    assert residents.of_this_node(told) is told, "nothing else is known"
    residents.listed["m"] = common_pb2.ModelSpec(generation=9)
    here = residents.of_this_node(told)
    assert (here.generation, here.path, told.generation) == (9, "/m", 7)


def test_spec_of_a_known_model_is_replaced_by_a_new_one_and_not_by_a_bare_name():
    residents = Residents(lambda resident: None)
    resident = residents.enter(common_pb2.ModelSpec(name="m", generation=7, path="/broken"))
    for generation in (9, 3):  # they are no numbers in a row
        residents.enter(common_pb2.ModelSpec(name="m", generation=generation, path=f"/{generation}"))
        assert resident.spec.path == f"/{generation}"
    residents.listed["m"] = common_pb2.ModelSpec(name="m", generation=5)
    assert residents.enter(residents.of_this_node(common_pb2.ModelSpec(name="m"))).spec.path == "/3"


def test_an_engine_is_outdated_when_the_catalogue_says_otherwise_than_what_it_read():
    residents = Residents(lambda resident: None)
    resident = residents.enter(common_pb2.ModelSpec(name="m", generation=7, context_tokens=100))
    residents.listed["m"] = common_pb2.ModelSpec(generation=7, context_tokens=100)
    assert not residents.is_outdated(resident), "it has no engine"
    resident.engine, resident.loaded = object(), (resident.spec, resident.spec)
    assert not residents.is_outdated(resident)
    residents.listed["m"] = common_pb2.ModelSpec(generation=7, context_tokens=100, pinned=True)
    assert not residents.is_outdated(resident), "that is not the engine's"
    for changed in (dict(generation=6, context_tokens=100), dict(generation=7, context_tokens=50)):
        residents.listed["m"] = common_pb2.ModelSpec(**changed)
        assert residents.is_outdated(resident)
    del residents.listed["m"]
    assert not residents.is_outdated(resident), "it has a fault, or was removed"
