"""Bringing a model up on a group: room, engine, weights, proof.

    1. book what the model is entitled to (quota, weights, floor): refused with the arithmetic, nothing has changed
    2. have balloond make the room for weights and floor
    3. an engine: the model's own, asleep, or one of the warm pool
    4. weights: copied from the image by the loader, or read from the checkpoint by the engine (then an image is made of
    them) 5. the engine verifies; only then does the model become active and its route known

A step that fails undoes those before it and says why. A manifest that does not match the image's falls back to the
checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from balloond.client import BalloondClient
from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.base import Command, CommandFailed, Engine, EngineDied
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.residents import Resident, Residents
from loader.client import LoaderClient
from protos import common_pb2, engine_pb2
from services import log, tasks
from services.errors import NotFound, PrismError, Refused, TimedOut, Unmet

T = TypeVar("T")
_log = log.get(__name__)
_ROOM_TIMEOUT_S = 20.0
_UNTIL_BURIED_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
_ROOM_HELD_S = 60.0
"""An ordinary load maps its last weights long after the room was made."""


class Activation:
    """Carries activations out for one group. Concurrent calls are for different models; `residents` sees to that."""

    def __init__(
        self,
        config: GpuSchedulerConfig,
        residents: Residents,
        pools: dict[str, WarmPool],
        balloond: BalloondClient | None,
        loader: LoaderClient | None,
        images: dict[str, str],
    ) -> None:
        self._config = config
        self._device = config.devices[0]
        self._residents = residents
        self._pools = pools
        self._balloond = balloond
        self._loader = loader
        self._images = images

    def has_image(self, resident: Resident) -> bool:
        """Whether the loader holds the model's weights: it said so in its catalogue, or in answer to our own saving,
        which the catalogue's stream may not have caught up with."""
        return bool(self._image_checksum(resident))

    def _image_checksum(self, resident: Resident) -> str:
        return self._images.get(resident.spec.name) or resident.image_checksum

    def _image_gone(self, resident: Resident) -> None:
        self._images.pop(resident.spec.name, None)
        resident.image_checksum = ""

    async def bring_up(self, resident: Resident) -> None:
        """To ACTIVE; `release_room` follows, for which requests do not wait. Raises PrismError; the resident then is as
        it was, hibernating or without an engine and a booking."""
        began = time.monotonic()
        resident.steps = []
        sleeper = resident.engine
        asleep = sleeper is not None and sleeper.alive
        self._residents.set(resident, common_pb2.WAKING)
        try:
            await self._make_room(resident, asleep)
            if asleep:
                await self._wake_or_load(resident)
            else:
                await self._load(resident)
        except (PrismError, asyncio.CancelledError):
            await self._undo(resident, asleep)
            raise
        resident.steps.append(("", time.monotonic()))
        await self._apply_operator_limit(resident)
        resident.deaths = 0
        seconds, woke = time.monotonic() - began, asleep and resident.engine is sleeper
        if woke:
            resident.wake_s = seconds
        else:
            resident.cold_s = seconds
        steps = {name: round(each, 3) for name, each in resident.step_seconds().items()}
        _log.info("model active", model=resident.spec.name, seconds=round(seconds, 3), from_sleep=woke, steps=steps)
        self._residents.set(resident, common_pb2.ACTIVE)

    # --- memory

    async def _make_room(self, resident: Resident, asleep: bool) -> None:
        if self._balloond is None:
            return
        self._step(resident, "making room")
        spec = resident.spec
        await self._balloond.set_booking(
            self._device,
            spec.name,
            quota_bytes=spec.quota_bytes,
            weights_bytes=self.weights_room(resident),
            floor_bytes=spec.floor_bytes,
        )
        room = await self._balloond.make_room(
            self._device,
            spec.name,
            bytes=self.weights_room(resident) + spec.floor_bytes,
            may_retract=True,
            hold_ms=int(1e3 * _ROOM_HELD_S),
            timeout_s=_ROOM_TIMEOUT_S,
        )
        if room.short_bytes:
            raise Refused(
                f"{spec.name} needs {self.weights_room(resident) + spec.floor_bytes} bytes for weights and floor on "
                f"{self._device}; {room.short_bytes} could not be freed"
            )

    async def release_room(self, resident: Resident) -> None:
        """The weights are there; from now on the floor is a claim like any other's, not memory kept empty."""
        if self._balloond is None:
            return
        try:
            await self._balloond.make_room(
                self._device, resident.spec.name, bytes=0, may_retract=False, hold_ms=0, timeout_s=_ROOM_TIMEOUT_S
            )
        except PrismError as error:
            _log.info("room is held until its time is over", model=resident.spec.name, why=str(error))

    async def _apply_operator_limit(self, resident: Resident) -> None:
        limit = self._residents.operator_limits.get(resident.spec.name)
        if self._balloond is None or limit is None:
            return
        try:
            await self._balloond.set_limit(self._device, resident.spec.name, max(limit, resident.spec.floor_bytes))
        except PrismError as error:
            _log.warning("operator's limit not set", model=resident.spec.name, why=str(error))

    def weights_room(self, resident: Resident) -> int:
        """Bytes of weights extents: the measured or declared size in whole extents."""
        extent = self._config.weights_extent_bytes
        weights = max(resident.spec.weights_bytes, resident.measured.weights_bytes)
        return -(-weights // extent) * extent

    async def _undo(self, resident: Resident, asleep: bool) -> None:
        engine = resident.engine
        if asleep and engine is not None and engine.alive:
            # Still asleep: its failed wake-up rolled its mappings back.
            await self.entitle(resident, awake=False)
            self._residents.set(resident, common_pb2.HIBERNATING)
            return
        if engine is not None:
            await self.release_engine(resident, engine)
        await self.drop_booking(resident)

    async def entitle(self, resident: Resident, awake: bool) -> None:
        """Books for a model that has its engine: weights and floor only while it is awake."""
        if self._balloond is None:
            return
        spec = resident.spec
        await self._balloond.set_booking(
            self._device,
            spec.name,
            quota_bytes=spec.quota_bytes,
            weights_bytes=self.weights_room(resident) if awake else 0,
            floor_bytes=spec.floor_bytes if awake else 0,
        )

    def book_again(self) -> None:
        """A balloond whose keeper died as well knows of our models only what their engines showed: tell it the rest."""
        for resident in self._residents:
            if resident.engine is not None and resident.change is None:
                awake = resident.residency == common_pb2.ACTIVE
                tasks.spawn(self._book_again(resident, awake), f"book {resident.spec.name} again")

    async def _book_again(self, resident: Resident, awake: bool) -> None:
        try:
            await self.entitle(resident, awake)
        except PrismError as error:
            _log.warning("booking not renewed", model=resident.spec.name, why=str(error))

    async def drop_booking(self, resident: Resident) -> None:
        """The lease of an engine that was just killed lives until the kernel has buried it: then it is tried again."""
        if self._balloond is None:
            return
        for pause_s in (*_UNTIL_BURIED_S, None):
            try:
                await self._balloond.drop_booking(self._device, resident.spec.name)
                return
            except NotFound:
                return
            except PrismError as error:
                if pause_s is None or not isinstance(error, Unmet):
                    _log.warning("booking kept", model=resident.spec.name, why=str(error))
                    return
                await asyncio.sleep(pause_s)

    # --- engine and weights

    async def release_engine(self, resident: Resident, engine: Engine) -> None:
        """Takes the model off an engine and gives it back to the pool; one that does not obey is killed."""
        resident.engine_gone()
        if engine.alive:
            command = engine.command(engine_pb2.ToEngine(unload=engine_pb2.Unload()))
            try:
                async with asyncio.timeout(self._config.engines.load_timeout_s):
                    await command.done()
            except (PrismError, TimeoutError) as error:
                _log.warning("engine did not unload", engine=engine.pid, why=str(error))
                engine.kill()
                await engine.dead.wait()
        self.pool(resident).give_back(engine)

    def pool(self, resident: Resident) -> WarmPool:
        kind = resident.spec.engine or self._config.engines.kind
        if kind not in self._pools:
            raise Unmet(f"this group has no {kind} engines")
        return self._pools[kind]

    async def _wake_or_load(self, resident: Resident) -> None:
        """A sleeper whose image was dropped meanwhile starts from the checkpoint."""
        try:
            await self._wake(resident)
        except (Unmet, NotFound) as error:
            _log.warning("cannot wake", model=resident.spec.name, why=str(error))
            self._image_gone(resident)
            assert resident.engine is not None
            await self.release_engine(resident, resident.engine)
            await self._load(resident)

    async def _wake(self, resident: Resident) -> None:
        assert resident.engine is not None
        self._step(resident, "mapping weights")
        command = self._command(resident, resident.engine, engine_pb2.ToEngine(wake=engine_pb2.Wake()))
        await self._fill_from_image(resident, resident.engine, command)
        await self._finish(resident, command)

    async def _load(self, resident: Resident) -> None:
        self._step(resident, "taking an engine")
        engine = await self.pool(resident).take(self._config.engines.start_timeout_s)
        resident.engine = engine
        from_image = self._loader is not None and self.has_image(resident)
        try:
            await self._load_into(resident, engine, from_image)
        except (Unmet, NotFound) as error:
            if not from_image:
                raise
            # The image is gone or of another shape: the ordinary way, and say so.
            _log.warning("image not used", model=resident.spec.name, why=str(error))
            self._image_gone(resident)
            await self.release_engine(resident, engine)
            resident.engine = engine = await self.pool(resident).take(self._config.engines.start_timeout_s)
            await self._load_into(resident, engine, from_image=False)

    async def _load_into(self, resident: Resident, engine: Engine, from_image: bool) -> None:
        engines = self._config.engines
        message = engine_pb2.ToEngine(
            load=engine_pb2.Load(
                model=resident.spec,
                device=self._device,
                balloond_socket=self._config.balloond_handoff,
                from_image=from_image,
                kv_extent_bytes=self._config.kv_extent_bytes,
                weights_extent_bytes=self._config.weights_extent_bytes,
                expected_checksum=self._image_checksum(resident) if from_image else "",
                poison_fresh_pages=engines.poison_fresh_pages,
                options=engines.options,
            )
        )
        self._step(resident, "building the model" if from_image else "reading the checkpoint")
        command = self._command(resident, engine, message)
        if from_image:
            await self._fill_from_image(resident, engine, command)
        await self._finish(resident, command)
        mapped = await command.mapped()
        resident.manifest, resident.lease_id = mapped.manifest, mapped.lease_id
        if not from_image:
            resident.checksum = mapped.checksum
            if self._loader is not None and self._balloond is not None:
                resident.saving = tasks.spawn(self._save_image(resident), f"image of {resident.spec.name}")

    def _command(self, resident: Resident, engine: Engine, message: engine_pb2.ToEngine) -> Command:
        return engine.command(message, lambda progress: self._residents.tell(resident, progress))

    async def _fill_from_image(self, resident: Resident, engine: Engine, command: Command) -> None:
        mapped = await self.within(command.mapped())
        assert self._loader is not None
        self._step(resident, "copying weights")
        await self.within(
            self._loader.load_image(
                resident.spec.name,
                resident.spec.generation,
                mapped.lease_id,
                mapped.manifest,
                on_progress=lambda progress: self._residents.tell(resident, progress),
            )
        )
        self._step(resident, "verifying")
        engine.verify(command)

    async def _finish(self, resident: Resident, command: Command) -> None:
        resident.measured = await self.within(command.done())

    async def within(self, work: Awaitable[T], extra_s: float = 0.0) -> T:
        """`work` within the time of one residency command. Raises TimedOut."""
        limit_s = self._config.engines.load_timeout_s + extra_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise TimedOut(f"not done within {limit_s:.0f} s") from None

    async def _save_image(self, resident: Resident) -> None:
        assert self._loader is not None
        try:
            await self._loader.save_image(
                resident.spec.name,
                resident.spec.generation,
                resident.lease_id,
                resident.manifest,
                resident.checksum,
                on_progress=lambda progress: None,
            )
            resident.image_checksum = resident.checksum
            _log.info("image made", model=resident.spec.name)
        except PrismError as error:
            _log.warning("no image made", model=resident.spec.name, why=str(error))
        finally:
            resident.saving = None

    def _step(self, resident: Resident, step: str) -> None:
        resident.steps.append((step, time.monotonic()))
        self._residents.tell(resident, common_pb2.Progress(step=step, total=1, unit="steps"))


def at_fault(error: Exception) -> bool:
    """Whether an activation failed because of the model itself, so that trying again cannot help."""
    return isinstance(error, CommandFailed) and error.model_at_fault


def worth_another_try(error: Exception) -> bool:
    """Whether the engine was to blame: the next one may do better."""
    return isinstance(error, EngineDied)
