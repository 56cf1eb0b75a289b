"""When a call of the loader is over for its caller."""

import asyncio

import pytest

from loader.client import LoaderClient
from loader.server import NAME
from protos import common_pb2, loader_pb2, loader_pb2_grpc
from services.errors import TimedOut
from services.rpc import rpc
from testing.patience import PATIENCE_S


class Loader(loader_pb2_grpc.LoaderServicer):
    """Says that all is there, and does not end the call."""

    def __init__(self):
        self.ended = asyncio.Event()

    async def LoadImage(self, request, context):
        try:
            yield loader_pb2.ImageProgress(progress=common_pb2.Progress(done=10, total=10))
            yield loader_pb2.ImageProgress(checksum="rows:1", image_bytes=10, source="image")
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.fixture
async def loader(tmp_path):
    loader = Loader()
    server = rpc.Server(f"unix:{tmp_path}/l")
    server.add(loader_pb2_grpc.add_LoaderServicer_to_server, loader, NAME)
    await server.start()
    loader.address = server.address
    yield loader
    await server.stop(0)


async def test_load_returns_with_the_message_of_its_end_and_ends_the_call(loader):
    client = LoaderClient(loader.address)
    told = []
    async with asyncio.timeout(PATIENCE_S):
        last = await client.load_image("m", 1, "lease", b"", on_progress=told.append)
        await loader.ended.wait()
    assert (last.checksum, last.source) == ("rows:1", "image")
    assert told[0].done == 10
    await client.close()


async def test_loader_that_does_not_answer_in_time_is_named_in_the_error(tmp_path):
    client = LoaderClient(f"unix:{tmp_path}/nobody", timeout_s=0.0)
    with pytest.raises(TimedOut, match=f"the loader at unix:{tmp_path}/nobody did not answer in time"):
        await client.state("m")
    await client.close()
