"""The loader's gRPC service: decode, await, encode."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from loader import wire
from loader.catalogue.models import CatalogueModel, NodeModels
from loader.catalogue.pins import Pins
from loader.copies.jobs import JobProgress, Jobs, JobTarget
from loader.copies.kv_copies import KvCopies
from loader.images.disk import DiskImages
from loader.images.image_capacity import ImageCapacity
from loader.images.image_jobs import ImageJobs
from loader.images.images import Images
from protos import common_pb2, loader_pb2, loader_pb2_grpc
from services.errors import Unmet
from services.rpc.watch import Watched
from services.telemetry import log

NAME = "prism.loader.v1.Loader"


class LoaderServicer(loader_pb2_grpc.LoaderServicer):
    """The service of protos/loader.proto, which describes its calls."""

    def __init__(
        self,
        models: NodeModels,
        images: Images,
        disk: DiskImages,
        pins: Pins,
        jobs: Jobs,
        image_jobs: ImageJobs,
        kv: KvCopies,
        capacity: ImageCapacity,
        catalogue: Watched[loader_pb2.Catalogue],
    ) -> None:
        self._models = models
        self._images = images
        self._disk = disk
        self._pins = pins
        self._jobs = jobs
        self._image_jobs = image_jobs
        self._kv = kv
        self._capacity = capacity
        self._catalogue = catalogue

    # --- the catalogue

    async def Watch(self, request: loader_pb2.WatchRequest, context: Any) -> AsyncIterator[loader_pb2.Catalogue]:
        async for catalogue in self._catalogue.follow():
            yield catalogue

    async def Inspect(self, request: loader_pb2.InspectRequest, context: Any) -> loader_pb2.Inspection:
        told = request.model
        listed = wire.listed(told) if told.path else self._models.get(told.name).listed
        spec = self._spec(await self._models.inspect(listed))
        under_way = map(wire.under_way, self._jobs.of(told.name))
        return loader_pb2.Inspection(model=spec, entry=self._entry(told.name), under_way=under_way)

    async def Look(self, request: loader_pb2.LookRequest, context: Any) -> loader_pb2.LookResponse:
        looked = await self._models.look(request.model, request.thorough, request.refused)
        return loader_pb2.LookResponse(entry=self._entry(request.model), changed=looked.changed)

    async def Add(self, request: loader_pb2.AddRequest, context: Any) -> common_pb2.ModelSpec:
        return self._spec(await self._models.add(wire.listed(request.model), wire.change(request.change)))

    async def Register(
        self, request: loader_pb2.RegisterRequest, context: Any
    ) -> AsyncIterator[loader_pb2.RegisterProgress]:
        model = await self._models.add(wire.listed(request.model))
        yield loader_pb2.RegisterProgress(model=self._spec(model))
        entry = self._entry(request.model.name)
        if request.prefetch or (entry is not None and entry.image_pinned):
            async with aclosing(self._image_jobs.prefetch(request.model.name)) as steps:
                async for step in steps:
                    if isinstance(step, JobProgress):
                        yield loader_pb2.RegisterProgress(progress=wire.progress(step))

    async def Remove(self, request: loader_pb2.RemoveRequest, context: Any) -> loader_pb2.RemoveResponse:
        name = wire.removed_name(request.name)
        await self._models.remove(name, wire.change(request.change))
        self._pins.remove(request.name)
        self._images.drop(request.name)
        return loader_pb2.RemoveResponse()

    # --- images

    async def SaveImage(
        self, request: loader_pb2.SaveImageRequest, context: Any
    ) -> AsyncIterator[loader_pb2.ImageProgress]:
        log.bind(model=request.model, lease=request.lease_id)
        what = JobTarget(
            "save",
            request.model,
            request.generation,
            request.rank,
            request.lease_id,
            request.manifest,
            request.checksum,
        )
        async with aclosing(self._image_jobs.save(what, wire.manifest_bytes(request.manifest))) as steps:
            async for step in steps:
                yield wire.image_progress(step)

    async def LoadImage(
        self, request: loader_pb2.LoadImageRequest, context: Any
    ) -> AsyncIterator[loader_pb2.ImageProgress]:
        log.bind(model=request.model, lease=request.lease_id)
        what = JobTarget(
            "load",
            request.model,
            request.generation,
            request.rank,
            request.lease_id,
            request.manifest,
            image_only=request.image_only,
        )
        async with aclosing(self._image_jobs.load(what, wire.manifest_bytes(request.manifest))) as steps:
            async for step in steps:
                yield wire.image_progress(step)

    async def DropImage(self, request: loader_pb2.DropImageRequest, context: Any) -> loader_pb2.DropImageResponse:
        self._images.drop(request.model)
        model = self._models.find(request.model)
        if request.from_disk and model is not None:
            await self._disk.drop(model.generation)
        return loader_pb2.DropImageResponse()

    async def CopyKv(self, request: loader_pb2.CopyKvRequest, context: Any) -> loader_pb2.CopyKvResponse:
        return loader_pb2.CopyKvResponse(bytes=await self._kv.copy(request.source, request.target))

    async def Cancel(self, request: loader_pb2.CancelRequest, context: Any) -> loader_pb2.CancelResponse:
        return loader_pb2.CancelResponse(ended=await self._jobs.cancel(request.model, request.lease_id))

    # --- pins

    async def Pin(self, request: loader_pb2.PinRequest, context: Any) -> loader_pb2.PinResponse:
        model = self._models.get(request.model)
        if model.listed.base:
            raise Unmet(f"{request.model} is an adapter of {model.listed.base}, whose image can be pinned")
        self._capacity.check_pin(model)
        await self._pins.add(request.model)
        return loader_pb2.PinResponse()

    async def Unpin(self, request: loader_pb2.UnpinRequest, context: Any) -> loader_pb2.UnpinResponse:
        if request.model not in self._pins:
            self._models.get(request.model)
        self._pins.remove(request.model)
        model = self._models.find(request.model)
        if model is not None and model.listed.pinned:
            raise Unmet(f"{request.model} is listed as pinned")
        return loader_pb2.UnpinResponse()

    def _spec(self, model: CatalogueModel) -> common_pb2.ModelSpec:
        """A model, of the catalogue or not, as it is, or would be, among the catalogue's."""
        return wire.model_spec(model, {**self._models.by_name, model.listed.name: model})

    def _entry(self, name: str) -> loader_pb2.Entry | None:
        """The entry of a model in the catalogue as callers see it now; None if it has none."""
        return next((entry for entry in self._catalogue.value.entries if entry.model.name == name), None)
