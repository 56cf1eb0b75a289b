"""A model whose weights only the loader's disk has: it comes up from there, and from its checkpoint when it cannot."""

import pytest

from loader.client import LoaderClient
from protos import common_pb2
from testing.systems.local import MODELS, world

MODEL = MODELS[0]
PROMPT = list(range(20, 60))


class Disk:
    """The loader of a running system, and its folder of images."""

    def __init__(self, it, folder):
        self.it = it
        self.folder = folder
        self.client = LoaderClient(it.local.unix("loader"))

    async def entry(self):
        return (await self.client.state(MODEL)).entry

    async def only_there(self):
        """Returns when no engine and no host memory has the weights any more, and the disk does."""

        async def written():
            return (await self.entry()).on_disk

        await self.it.until(written, "the image was never written")
        await self.it.evict(MODEL, common_pb2.COLD)
        await self.client.drop_image(MODEL)

    def said(self, log, what):
        return sum(what in line for path in (self.it.local.state / "logs").glob(f"{log}*.log") for line in path.open())


@pytest.fixture
async def disk(request, tmp_path):
    settings = {"disk_folder": str(tmp_path / "images"), "disk_capacity_bytes": 64 << 20}
    async with world(request.param, loader=settings) as it:
        disk = Disk(it, tmp_path / "images")
        yield disk
        await disk.client.close()


@pytest.mark.parametrize("disk", ["echo", pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)
async def test_a_model_comes_up_from_disk_and_from_its_checkpoint_when_the_file_is_damaged(disk):
    answer = (await disk.it.complete(MODEL, PROMPT, 8))["choices"]
    await disk.only_there()
    assert (await disk.it.complete(MODEL, PROMPT, 8))["choices"] == answer
    assert disk.said("loader", "image read from disk") == 1 and (await disk.entry()).has_image
    assert disk.said("gpu_scheduler", "image not used") == 0

    await disk.only_there()
    (file,) = disk.folder.iterdir()
    with open(file, "r+b") as opened:
        opened.seek(100_000)
        opened.write(b"other bytes")
    assert (await disk.it.complete(MODEL, PROMPT, 8))["choices"] == answer
    assert disk.said("loader", "image on disk not used and removed") == 1
    assert disk.said("gpu_scheduler", "image not used") == 1
    await disk.only_there()  # an image was made again
