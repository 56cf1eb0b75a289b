"""Bringing a model up on a group: memory, engine, weights, verification.

    1. take an engine: the model's own, asleep, or one of the warm pool; if none is warm, one is started after 3
    2. book what the model is entitled to (quota, weights with CUDA graphs, floor). A refusal carries the arithmetic
       and changes nothing. Idle engines of the warm pool give way
    3. have balloond make room for weights, graphs and floor
    4. get the weights: copied by the loader, from another device that has them or from the image, or read from the
       checkpoint by the engine (then an image is made of them)
    5. the engine verifies; only then is the model active and do requests reach it; they wait in the queue until then
    6. book what the engine measured, if that is something else: a model that leaves too little for its floor is refused

A step that fails undoes those before it and raises its reason. If the manifest does not match the image's, the
checkpoint is read instead. Weights from another device that do not verify are requested again, from the image; if those
of the image do not verify either, the loader drops the image, and the next ones come from disk or from the checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.engine import Command, CommandFailed, EngineDied, EngineProcess
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residency.weights import CHECKPOINT, Weights, WeightsDoubted
from gpu_scheduler.residents import Resident, Residents
from gpu_scheduler.telemetry import traces
from gpu_scheduler.telemetry.counters import ACTIVATION
from protos import common_pb2, engine_pb2
from services.errors import NotFound, PrismError, Unmet
from services.telemetry import log

_log = log.get(__name__)
_COMPILING = "compiling kernels"


class Activator:
    """Carries out activations for one group. Concurrent calls have to be for different models; `residents` sees to
    that."""

    def __init__(
        self,
        config: GpuSchedulerConfig,
        residents: Residents,
        pools: dict[str, WarmPool],
        bookings: Bookings,
        weights: Weights,
    ) -> None:
        self._config = config
        self._residents = residents
        self._pools = pools
        self._bookings = bookings
        self._weights = weights

    async def bring_up(self, resident: Resident) -> None:
        """Brings the model to ACTIVE. The caller has to call `Bookings.release_room` afterwards, for which requests do
        not wait. Raises PrismError; the resident is then as it was, hibernating or without an engine and a booking."""
        began = time.monotonic()
        resident.steps, resident.weights_from = [], []
        resident.compiling, resident.kernels_compiled = False, 0
        asleep = resident.engine is not None and resident.engine.alive
        resident.activation = traces.activation(resident, asleep, began)
        self._residents.set(resident, common_pb2.WAKING)
        taken: EngineProcess | None = None
        try:
            if not asleep:
                self._residents.step(resident, "taking an engine")
                taken = self.pool(resident).take_idle()
            if taken is not None:
                await self._bookings.engine_taken()
            await self._bookings.make_room(resident)
            booked = self._bookings.entitlement(resident, awake=True)
            asleep = asleep and await self._wake(resident)
            if not asleep:
                engine, taken = taken, None
                await self._load(resident, engine)
                if self._bookings.entitlement(resident, awake=True) != booked:
                    await self._bookings.book(resident, awake=True)
        except (PrismError, asyncio.CancelledError) as error:
            resident.compiling = False
            traces.activated(resident, time.monotonic(), error)
            try:
                await self.undo(resident, asleep)
            finally:
                if taken is not None:
                    self.pool(resident).give_back(taken)
            raise
        resident.steps.append(("", time.monotonic()))
        if resident.engine is not None:
            self.pool(resident).settled(resident.engine)
        await self._bookings.set_limit(resident)
        resident.image_only = resident.compiling = False
        seconds = resident.came_s = time.monotonic() - began
        ACTIVATION.labels(resident.spec.name, "hibernation" if asleep else "engine").observe(seconds)
        if asleep:
            resident.wake_s = seconds
        else:
            resident.cold_s = seconds
        traces.activated(resident, resident.steps[-1][1])
        steps = {name: round(each, 3) for name, each in resident.step_seconds().items()}
        _log.info(
            "model active",
            model=resident.spec.name,
            seconds=round(seconds, 3),
            from_sleep=asleep,
            weights_from=resident.weights_from,
            kernels_compiled=resident.kernels_compiled,
            steps=steps,
        )
        self._residents.set(resident, common_pb2.ACTIVE)

    async def undo(self, resident: Resident, asleep: bool) -> None:
        """Puts a model that did not come up back as it was before, asleep or without an engine."""
        engine = resident.engine
        if asleep and engine is not None and engine.alive:
            # The engine is still asleep: its failed wake-up rolled its mappings back.
            await self._bookings.rebook(resident, awake=False)
            self._residents.set(resident, common_pb2.HIBERNATING)
            return
        if engine is not None:
            await self.release_engine(resident, engine)
        await self._bookings.drop(resident)

    # --- engines

    async def release_engine(self, resident: Resident, engine: EngineProcess) -> None:
        """Takes the model off its engine and gives the engine back to the pool; one that does not obey is killed."""
        resident.engine_gone()
        if engine.alive:
            command = engine.command(engine_pb2.ToEngine(unload=engine_pb2.Unload()))
            try:
                async with asyncio.timeout(self._config.engines.load_timeout_s):
                    await command.done()
            except (PrismError, TimeoutError) as error:
                _log.warning("engine did not unload", engine=engine.pid, why=str(error))
                await engine.give_up()
        self.pool(resident).give_back(engine)

    def kind_of(self, resident: Resident) -> str:
        """The kind of the model's engine."""
        return resident.spec.engine or self._config.engines.kind

    def pool(self, resident: Resident) -> WarmPool:
        kind = self.kind_of(resident)
        if kind not in self._pools:
            raise Unmet(f"this group has no {kind} engines")
        return self._pools[kind]

    async def _wake(self, resident: Resident) -> bool:
        """Wakes the model's engine. False if the image was dropped meanwhile: the engine has let go of the model, which
        has to be loaded. The engine lets go too if the weights do not come for another reason. An engine that refuses
        to wake stays asleep, and its error is raised."""
        engine = resident.engine
        assert engine is not None
        self._residents.step(resident, "mapping weights")
        command = self._command(resident, engine, engine_pb2.ToEngine(wake=engine_pb2.Wake()))
        try:
            await self._weights.copy(resident, engine, command)
            await self._weights.wait_verified(resident, engine, command)
        except (PrismError, asyncio.CancelledError) as error:
            if command.ended:
                raise
            await self.release_engine(resident, engine)
            if not isinstance(error, (Unmet, NotFound)):
                raise
            _log.warning("cannot wake", model=resident.spec.name, why=str(error))
            self._weights.image_gone(resident)
            return False
        return True

    async def _load(self, resident: Resident, engine: EngineProcess | None) -> None:
        """Loads the model into this engine of the pool, or into one that is started."""
        if engine is None:
            self._residents.step(resident, "taking an engine")
            pool = self.pool(resident)
            if not pool.has_started_one and not resident.compiling:
                resident.compiling = True
                self._residents.set(resident, common_pb2.WAKING)  # so that placement learns of it now
            engine = await pool.take(self._config.engines.start_timeout_s)
        resident.engine, resident.loaded = engine, (resident.spec, resident.listed or resident.spec)
        from_image = self._weights.has_loader and self._weights.has_image(resident)
        try:
            await self._load_into(resident, engine, from_image)
        except (Unmet, NotFound) as error:
            if not from_image:
                raise
            # The image is gone or has another shape: log it and read the checkpoint.
            _log.warning("image not used", model=resident.spec.name, why=str(error))
            self._weights.image_gone(resident)
            await self.release_engine(resident, engine)
            resident.engine = engine = await self.pool(resident).take(self._config.engines.start_timeout_s)
            await self._load_into(resident, engine, from_image=False)

    async def _load_into(self, resident: Resident, engine: EngineProcess, from_image: bool) -> None:
        engines = self._config.engines
        devices = self._config.devices
        checksums = self._weights.image_checksums(resident) if from_image else [""] * len(devices)
        message = engine_pb2.ToEngine(
            load=engine_pb2.Load(
                model=resident.spec,
                device=devices[0],
                balloond_socket=self._config.balloond_handoff,
                from_image=from_image,
                kv_extent_bytes=self._config.kv_extent_bytes,
                weights_extent_bytes=self._config.weights_extent_bytes,
                expected_checksum=checksums[0],
                poison_fresh_pages=engines.poison_fresh_pages,
                options=engines.options,
                others=[
                    engine_pb2.Load.Part(device=device, expected_checksum=checksum)
                    for device, checksum in zip(devices[1:], checksums[1:], strict=True)
                ],
            )
        )
        self._residents.step(resident, "building the model" if from_image else "reading the checkpoint")
        command = self._command(resident, engine, message)
        if from_image:
            await self._weights.copy(resident, engine, command)
        else:
            resident.weights_from = [CHECKPOINT] * len(devices)
        await self._weights.wait_verified(resident, engine, command)
        if not from_image and self._weights.has_loader and self._bookings.devices is not None:
            self._weights.begin_saving(resident, engine, await command.mapped())

    def _command(self, resident: Resident, engine: EngineProcess, message: engine_pb2.ToEngine) -> Command:
        engine.on_compiling = partial(self._compiles, resident, engine)
        return engine.command(message, lambda progress: self._residents.tell(resident, progress))

    def _compiles(self, resident: Resident, engine: EngineProcess, told: engine_pb2.Compiling) -> None:
        """Notes that the model's engine begins to compile a kernel, or has compiled it: a step within the one under
        way, which continues after it."""
        if resident.engine is not engine or resident.residency != common_pb2.WAKING or not resident.steps:
            return
        resident.kernels_compiled += told.done
        if not resident.compiling:
            resident.compiling = True
            self._residents.set(resident, common_pb2.WAKING)  # so that placement learns of it now
        steps, now = resident.steps, time.monotonic()
        within, began = steps[-1]
        if not told.done:
            steps.append((_COMPILING, now))
        elif within == _COMPILING:
            steps.append((steps[-2][0], now))
        else:  # its beginning was not reported
            steps += [(_COMPILING, max(began, now - told.seconds)), (within, now)]
        progress = common_pb2.Progress(step=_COMPILING, done=resident.kernels_compiled, unit="kernels")
        self._residents.tell(resident, progress)


def at_fault(error: Exception | None) -> bool:
    """Whether an activation failed because of the model itself, so that trying again cannot help."""
    return isinstance(error, CommandFailed) and error.model_at_fault


def may_pass(error: Exception) -> bool:
    """Whether an activation failed because of the host, for a reason that may be gone in a moment."""
    return isinstance(error, CommandFailed) and error.may_pass


def worth_another_try(error: Exception) -> bool:
    """Whether the engine was at fault, or a device that gave the weights: another engine, or the image, may do
    better."""
    return isinstance(error, (EngineDied, WeightsDoubted))
