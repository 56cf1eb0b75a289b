"""gRPC of the loader: decode, await, encode."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from loader import wire
from loader.copying import Copying, Step
from loader.images import Images
from loader.models import Models
from protos import common_pb2, loader_pb2, loader_pb2_grpc
from services import log
from services.watch import Watched

NAME = "prism.loader.v1.Loader"


class LoaderServicer(loader_pb2_grpc.LoaderServicer):
    """See protos/loader.proto."""

    def __init__(
        self, models: Models, images: Images, copying: Copying, catalogue: Watched[loader_pb2.Catalogue]
    ) -> None:
        self._models = models
        self._images = images
        self._copying = copying
        self._catalogue = catalogue

    async def Watch(self, request: loader_pb2.WatchRequest, context: Any) -> AsyncIterator[loader_pb2.Catalogue]:
        async for catalogue in self._catalogue.follow():
            yield catalogue

    async def Inspect(self, request: loader_pb2.AddRequest, context: Any) -> common_pb2.ModelSpec:
        return wire.model_spec(await self._models.inspect(wire.listed(request.model)))

    async def Add(self, request: loader_pb2.AddRequest, context: Any) -> common_pb2.ModelSpec:
        return wire.model_spec(await self._models.add(wire.listed(request.model)))

    async def Remove(self, request: loader_pb2.RemoveRequest, context: Any) -> loader_pb2.RemoveResponse:
        await self._models.remove(request.name)
        self._images.drop(request.name)
        return loader_pb2.RemoveResponse()

    async def SaveImage(
        self, request: loader_pb2.SaveImageRequest, context: Any
    ) -> AsyncIterator[loader_pb2.ImageProgress]:
        log.bind(model=request.model, lease=request.lease_id)
        total = wire.manifest_bytes(request.manifest)
        steps = self._copying.save(
            request.model, request.generation, request.lease_id, request.manifest, total, request.checksum, request.rank
        )
        async with aclosing(_told(steps, total)) as messages:
            async for message in messages:
                yield message

    async def LoadImage(
        self, request: loader_pb2.LoadImageRequest, context: Any
    ) -> AsyncIterator[loader_pb2.ImageProgress]:
        log.bind(model=request.model, lease=request.lease_id)
        total = wire.manifest_bytes(request.manifest)
        steps = self._copying.load(
            request.model, request.generation, request.lease_id, request.manifest, total, request.rank
        )
        async with aclosing(_told(steps, total)) as messages:
            async for message in messages:
                yield message

    async def DropImage(self, request: loader_pb2.DropImageRequest, context: Any) -> loader_pb2.DropImageResponse:
        self._images.drop(request.model)
        return loader_pb2.DropImageResponse()


async def _told(steps: AsyncGenerator[Step, None], total: int) -> AsyncGenerator[loader_pb2.ImageProgress, None]:
    async with aclosing(steps):
        async for step in steps:
            yield wire.progress("copying", step, total) if isinstance(step, int) else wire.finished(step)
