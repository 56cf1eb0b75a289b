"""Weights of a group's models: what the loader holds of them, its copies to engines, and the images that are made of
what engines read from a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.engine import Command, CommandFailed, EngineDied, EngineProcess
from gpu_scheduler.memory.devices import all_of
from gpu_scheduler.residents import Images, Resident, Residents
from loader.client import LoaderClient
from protos import common_pb2, engine_pb2
from services.errors import NotFound, PrismError, Refused, TimedOut, Unavailable, Unmet
from services.runtime import tasks
from services.runtime.pauses import Pauses
from services.telemetry import log

_log = log.get(__name__)
CHECKPOINT, IMAGE = "checkpoint", "image"
"""Sources of weights, apart from devices."""
_DEATH_HEARD_S = 1.0
"""Seconds of waiting for the end of an engine whose lease is gone."""
_UNTIL_LOADER_IS_BACK_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts to have an image made: a loader that died is replaced in a second or two."""
_FIRST_SAVE_PAUSE_S, _LONGEST_SAVE_PAUSE_S = 30.0, 600.0
"""Seconds before another attempt to make an image that could not be made: host memory may have room by then."""


class WeightsDoubted(PrismError):
    """The weights that an engine got from another device, or from an image, do not verify; that source is not used
    again."""


class Weights:
    """The weights of one group's models, with the loader of their node."""

    def __init__(
        self,
        config: GpuSchedulerConfig,
        residents: Residents,
        loader: LoaderClient | None,
        images: Images,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        death_heard_s: float = _DEATH_HEARD_S,
    ) -> None:
        """Without `loader` engines read the checkpoint. `images`: what it holds, as its catalogue last said.
        `death_heard_s`: seconds within which an engine whose lease is gone is heard to have died."""
        self._config = config
        self._residents = residents
        self._loader = loader
        self._images = images
        self._sleep = sleep
        self._death_heard_s = death_heard_s
        self._save_pauses = Pauses(_FIRST_SAVE_PAUSE_S, _LONGEST_SAVE_PAUSE_S)

    @property
    def has_loader(self) -> bool:
        return self._loader is not None

    # --- what there is

    def has_image(self, resident: Resident) -> bool:
        """Whether the loader holds the model's weights, in host memory or on disk, according to its catalogue or to its
        answer to this group's own saving, with which the catalogue's stream may not have caught up."""
        return bool(self.image_checksums(resident))

    def image_checksums(self, resident: Resident) -> list[str]:
        """Checksums of the image's parts, by rank; empty if there is none for the devices of this group."""
        checksums = self._images.get(resident.spec.name) or resident.image_checksums
        # The catalogue may be ahead of the model that is here.
        return checksums if len(checksums) == len(self._config.devices) else []

    def image_gone(self, resident: Resident) -> None:
        """Notes that the loader holds the model's weights no more."""
        self._images.pop(resident.spec.name, None)
        resident.image_checksums = []

    def why_no_image(self, resident: Resident) -> str:
        """Why there is no image of a model that has an engine, in one line; empty if there is one."""
        if self.has_image(resident):
            return ""
        if self._loader is None:
            return "this group has no loader, which would make it"
        if resident.saving is not None:
            return "it is being made"
        return resident.no_image or "none was made of its weights yet"

    async def check_files(self, resident: Resident, *, thorough: bool, refused: bool) -> None:
        """Has the loader check the model's files: before an engine is given a checkpoint, and, thoroughly, after an
        engine failed with one, or `refused` it. Raises Unmet with the fault that the loader finds: it is in the
        loader's catalogue then, and the loader looks at the files again by itself. Raises CommandFailed if the files
        changed while the engine read them."""
        if self._loader is None:
            return
        within_s = self._config.look_timeout_s
        try:
            looked = await self._loader.look(resident.spec.name, thorough=thorough, refused=refused, timeout_s=within_s)
        except PrismError as error:  # the loader is older, away, or does not list the model
            _log.info("files not looked at", model=resident.spec.name, why=str(error))
            return
        if looked.entry.error:
            raise Unmet(looked.entry.error)
        if thorough and looked.changed:
            raise CommandFailed("its files have changed while they were read", model_at_fault=False, may_pass=True)

    # --- to an engine

    async def copy(self, resident: Resident, engine: EngineProcess, command: Command) -> None:
        """Has the loader copy the weights to where the engine has mapped memory for them in `command`, and then the
        engine begin to verify them. Raises EngineDied, and other PrismErrors."""
        limit_s = self._config.engines.load_timeout_s
        ranks = await tasks.within(command.mapped(), limit_s, engine.since_compiling_s)
        assert self._loader is not None
        self._residents.step(resident, "copying weights")
        copies = (
            self._loader.load_image(
                resident.spec.name,
                resident.spec.generation,
                mapped.lease_id,
                mapped.manifest,
                rank=mapped.rank,
                image_only=resident.image_only,
                on_progress=lambda progress: self._residents.tell(resident, progress),
            )
            for mapped in ranks
        )
        try:
            resident.weights_from = [loaded.source for loaded in await tasks.within(all_of(copies), limit_s)]
        except NotFound:
            # A lease is gone: the kernel reports an engine's end to balloond and to this process, in any order.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._death_heard_s):
                    await engine.dead.wait()
                raise EngineDied(f"engine {engine.pid} died while its weights arrived") from None
            raise
        self._residents.step(resident, "verifying")
        engine.verify(command)

    async def wait_verified(self, resident: Resident, engine: EngineProcess, command: Command) -> None:
        """Waits until the engine has the model, with verified weights. Raises WeightsDoubted if those of a device or an
        image do not verify: they are taken from another source next. Raises other PrismErrors."""
        try:
            limit_s = self._config.engines.load_timeout_s
            resident.measured = await tasks.within(command.done(), limit_s, engine.since_compiling_s)
        except CommandFailed as error:
            sources = set(resident.weights_from)
            if error.weights_differ and sources.difference((CHECKPOINT, IMAGE)):
                # Any of several parts may be wrong, but the image is more likely to be right.
                resident.image_only = True
            elif error.weights_differ and IMAGE in sources:
                _log.warning("image dropped: its weights do not verify", model=resident.spec.name, why=str(error))
                await self._drop_image(resident)
                self.image_gone(resident)
            else:
                raise
            raise WeightsDoubted(str(error)) from None

    # --- from an engine

    def begin_saving(self, resident: Resident, engine: EngineProcess, weights: list[engine_pb2.WeightsMapped]) -> None:
        """Has an image made of the weights that the engine has mapped, by rank."""
        work = self._save_image(resident, engine, weights)
        resident.saving = tasks.spawn(work, f"image of {resident.spec.name}")

    async def _save_image(
        self, resident: Resident, engine: EngineProcess, weights: list[engine_pb2.WeightsMapped]
    ) -> None:
        name = resident.spec.name
        try:
            for pause_s in (*_UNTIL_LOADER_IS_BACK_S, None):
                try:
                    await self._save_parts(resident, weights)
                    break
                except Unavailable as error:
                    if pause_s is None:
                        raise
                    _log.info("image not made yet", model=name, why=str(error))
                    await asyncio.sleep(pause_s)
            resident.image_checksums = [mapped.checksum for mapped in weights]
            resident.no_image = ""
            self._save_pauses.forget(name)
            _log.info("image made", model=name)
        except PrismError as error:
            if resident.no_image != str(error):
                _log.warning("no image made", model=name, why=str(error))
            resident.no_image = str(error)
            if len(weights) > 1:
                await self._drop_image(resident)
            if isinstance(error, (Refused, Unavailable, TimedOut)):  # else its weights are others by now
                tasks.spawn(self._save_later(resident, engine, weights), f"image of {name}, later")
        finally:
            resident.saving = None

    async def _save_later(
        self, resident: Resident, engine: EngineProcess, weights: list[engine_pb2.WeightsMapped]
    ) -> None:
        """Tries again to make an image, as long as the engine has the weights."""
        while resident.engine is engine and not self.has_image(resident):
            await self._sleep(self._save_pauses.failed(resident.spec.name))
            is_there = resident.engine is engine and resident.residency == common_pb2.ACTIVE
            if is_there and resident.change is None and not self.has_image(resident):
                self.begin_saving(resident, engine, weights)
                return

    async def _save_parts(self, resident: Resident, weights: list[engine_pb2.WeightsMapped]) -> None:
        """Has the loader save the parts of all ranks. Parts that it has already are kept as they are."""
        assert self._loader is not None
        copies = (
            self._loader.save_image(
                resident.spec.name,
                resident.spec.generation,
                mapped.lease_id,
                mapped.manifest,
                mapped.checksum,
                rank=mapped.rank,
                on_progress=lambda progress: None,
            )
            for mapped in weights
        )
        await all_of(copies)

    async def _drop_image(self, resident: Resident) -> None:
        """Drops an image that is of no use: it lacks parts, or its weights do not verify."""
        assert self._loader is not None
        try:
            await self._loader.drop_image(resident.spec.name)
        except PrismError as error:
            _log.warning("image not dropped", model=resident.spec.name, why=str(error))
