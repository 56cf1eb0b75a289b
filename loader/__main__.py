"""`python -m loader --config FILE`: the wiring of one node's loader."""

from __future__ import annotations

import asyncio
import signal
import time

from balloond.keeper.client import KeeperClient
from loader import metrics, wire
from loader.catalogue import added, pins
from loader.catalogue.models import CatalogueModel, NodeModels, Sizes
from loader.catalogue.pins import Pins
from loader.catalogue.relisting import Relisting
from loader.checkpoints.text_trials import TextTrials
from loader.config import LoaderConfig
from loader.copies.handoff_client import HandoffClient
from loader.copies.jobs import Jobs
from loader.copies.kv_copies import KvCopies
from loader.images.copying import ImageCopier
from loader.images.disk import DiskImages
from loader.images.image_capacity import ImageCapacity
from loader.images.image_jobs import ImageJobs
from loader.images.image_memory import Image
from loader.images.images import Images
from loader.keeping import OWNER
from loader.server import NAME, LoaderServicer
from loader.transfers import Transfers, busy
from protos import loader_pb2, loader_pb2_grpc
from services.errors import Invalid
from services.rpc.watch import Watched
from services.runtime.process_limits import allow_descriptors
from services.service import Service, read_arguments, run
from services.telemetry import log

_log = log.get(__name__)


async def build(service: Service) -> None:
    config = service.config
    assert isinstance(config, LoaderConfig)
    allow_descriptors()  # one for each image and each borrowed extent
    catalogue: Watched[loader_pb2.Catalogue] = Watched(loader_pb2.Catalogue())
    sizes = Sizes(config.device_dtype_bytes, config.kv_extent_bytes, config.engine_quota_bytes)

    def changed() -> None:
        looking.catalogue_changed()
        entries = [
            wire.entry(
                model,
                images.parts(model.listed.name),
                disk.offered(model.generation),
                is_pinned(model),
                models.change(model.listed.name),
                looking.retry_s(model),
                capacity.why_none(model),
                models.by_name,
            )
            for model in models.all()
        ]
        revision = catalogue.revision + 1
        catalogue.set(wire.catalogue(entries, models.removed, images.capacity_bytes, images.used_bytes, revision))
        metrics.HELD.set(images.used_bytes)
        metrics.DISK_HELD.set(disk.used_bytes)
        broken = sum(bool(entry.error) for entry in entries)
        metrics.MODELS.labels("error").set(broken)
        metrics.MODELS.labels("ready").set(len(entries) - broken)

    def is_pinned(model: CatalogueModel) -> bool:
        return model.listed.pinned or model.listed.name in pinned

    def describe(name: str) -> tuple[bool, int | None]:
        model = models.find(name)
        return (False, None) if model is None else (is_pinned(model), model.generation)

    def describe_generation(generation: int) -> tuple[bool, bool]:
        having = [model for model in models.all() if model.generation == generation]
        return any(map(is_pinned, having)), bool(having)

    def write_to_disk(image: Image) -> None:
        disk.write_soon(image)

    keeper = KeeperClient(config.keeper, OWNER)
    texts = TextTrials()
    service.on_stop(texts.close)
    models = NodeModels(sizes, changed, keeper, text_fault=texts.fault)
    looking = Relisting(models, time.monotonic, changed)
    pinned = Pins(keeper, changed)
    transfers = Transfers(config.copy_devices, busy.look)
    transfers.paths()
    images = Images(
        keeper, config.host_capacity_bytes, time.monotonic, describe, changed, transfers.forget, write_to_disk
    )
    capacity = ImageCapacity(models, images, is_pinned)
    disk = DiskImages(
        config.disk_folder,
        config.disk_capacity_bytes,
        images,
        describe_generation,
        changed,
        answer_timeout_s=config.answer_timeout_s,
    )
    handoff = HandoffClient(config.handoff, config.answer_timeout_s)
    copying = ImageCopier(
        models,
        images,
        handoff,
        transfers.of,
        transfers.has_way,
        chunk_bytes=config.chunk_bytes,
        answer_timeout_s=config.answer_timeout_s,
    )
    metrics.CAPACITY.set(config.host_capacity_bytes)
    jobs = Jobs(time.monotonic)
    image_jobs = ImageJobs(models, images, disk, copying, jobs)
    kv = KvCopies(handoff, transfers.of, config.chunk_bytes)
    servicer = LoaderServicer(models, images, disk, pinned, jobs, image_jobs, kv, capacity, catalogue)
    service.add(loader_pb2_grpc.add_LoaderServicer_to_server, servicer, NAME)

    try:
        await models.reload(config.catalogue)
    except ValueError as error:
        raise Invalid(str(error)) from None
    kept = await keeper.start(config.answer_timeout_s)
    service.on_stop(keeper.close)
    keeper.follow(lambda: [*images.everything(), *models.everything(), *pinned.everything()], service.fail)
    pinned.restore(record for record, _ in kept if record.kind == pins.KIND)
    images.restore((record, fd) for record, fd in kept if record.kind not in (added.KIND, pins.KIND))
    await models.restore([record for record, _ in kept if record.kind == added.KIND])
    try:
        await disk.start()
    except OSError as error:
        raise Invalid(f"disk_folder {config.disk_folder}: {error.strerror}") from None
    for image in images.all():
        disk.write_soon(image)
    service.spawn(handoff.run(), "balloond")
    service.spawn(looking.run(), "look at models in error")
    service.spawn(_reload_on_hangup(models, images, pinned, config.catalogue), "reload on SIGHUP")
    await service.ready()


async def _reload_on_hangup(models: NodeModels, images: Images, pinned: Pins, path: str) -> None:
    """Reads the catalogue file and all checkpoints afresh at each SIGHUP. A file that cannot be used changes
    nothing."""
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    while True:
        await asked.wait()
        asked.clear()
        try:
            await models.reload(path)
        except ValueError as error:
            _log.error("catalogue not reloaded", why=str(error))
            continue
        pinned.keep_only(model.listed.name for model in models.all())
        for image in images.all():
            if models.find(image.model) is None:
                images.drop(image.model)


def main() -> None:
    run(read_arguments(LoaderConfig, "The catalogue of models, and their weights in host memory."), build)


if __name__ == "__main__":
    main()
