"""When a call of the loader is over for its caller."""

import asyncio

import pytest

from loader.checkpoints import text_trials
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
        self.left_s = []

    async def Inspect(self, request, context):
        self.left_s.append(context.time_remaining())
        return loader_pb2.Inspection()

    async def Look(self, request, context):
        self.left_s.append(context.time_remaining())
        return loader_pb2.LookResponse()

    async def Add(self, request, context):
        self.left_s.append(context.time_remaining())
        return common_pb2.ModelSpec()

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


async def test_calls_that_try_a_models_text_last_as_long_as_a_trial_may(loader):
    client, listing = LoaderClient(loader.address), common_pb2.ModelListing(name="m", path="/m")
    await client.state("m")
    await client.inspect(listing)
    await client.look("m")
    await client.add(listing)
    assert len(loader.left_s) == 4 and min(loader.left_s) > text_trials.START_S + 2 * text_trials.ANSWER_S
    await client.close()


async def test_loader_that_does_not_answer_in_time_is_named_in_the_error(tmp_path):
    client = LoaderClient(f"unix:{tmp_path}/nobody", timeout_s=0.0)
    with pytest.raises(TimedOut, match=f"the loader at unix:{tmp_path}/nobody did not answer in time"):
        await client.state("m")
    await client.close()
