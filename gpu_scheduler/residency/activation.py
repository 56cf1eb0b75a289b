"""Bringing a model up on a group: memory, engine, weights, verification.

    1. take an engine: the model's own, asleep, or one of the warm pool; if none is warm, one is started after 3
    2. book what the model is entitled to (quota, weights with CUDA graphs, floor). A refusal carries the arithmetic
       and changes nothing. Idle engines of the warm pool give way
    3. have balloond make room for weights, graphs and floor
    4. get the weights: copied by the loader, from another device that has them or from the image, or read from the
       checkpoint by the engine (then an image is made of them)
    5. the engine verifies; only then does the model become active and its route known
    6. book what the engine measured of itself, where the catalogue states nothing

A step that fails undoes those before it and raises its reason. If the manifest does not match the image's, the
checkpoint is read instead. Weights from another device that do not verify are requested again, from the image; if those
of the image do not verify either, the loader drops the image, and the next ones come from disk or from the checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.engine import Command, CommandFailed, EngineDied, EngineProcess
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.devices import Devices, all_of, share
from gpu_scheduler.memory.warm_booking import WarmBooking
from gpu_scheduler.residents import Images, Resident, Residents
from gpu_scheduler.telemetry import traces
from gpu_scheduler.telemetry.counters import ACTIVATION
from loader.client import LoaderClient
from protos import common_pb2, engine_pb2
from services.errors import NotFound, PrismError, Refused, TimedOut, Unavailable, Unmet
from services.runtime import tasks
from services.runtime.pauses import Pauses
from services.telemetry import log

T = TypeVar("T")
_log = log.get(__name__)
_CHECKPOINT, _IMAGE = "checkpoint", "image"
"""Sources of weights, apart from devices."""
_COMPILING = "compiling kernels"
_ROOM_TIMEOUT_S = 20.0
_KEPT_SPARE_BYTES = 16 << 20
"""Bytes booked on top of what a sleeping engine reports to keep: the driver's own tables grow and shrink."""
_DEATH_HEARD_S = 1.0
_UNTIL_LOADER_IS_BACK_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between attempts to have an image made: a loader that died is replaced in a second or two."""
_LOOK_S = 10.0
"""Seconds that the loader may take to look at a model's files; without its answer an engine finds faults too."""
_FIRST_SAVE_PAUSE_S, _LONGEST_SAVE_PAUSE_S = 30.0, 600.0
"""Seconds before another attempt to make an image that could not be made: host memory may have room by then."""
_ROOM_HELD_S = 60.0
"""Seconds for which balloond holds the room that it made: a load from the checkpoint maps its last weights long after
that."""


class WeightsDoubted(PrismError):
    """An engine could not come up with the weights that another device gave it, or with an image that is now
    dropped."""


class Activator:
    """Carries out activations for one group. Concurrent calls have to be for different models; `residents` sees to
    that."""

    def __init__(
        self,
        config: GpuSchedulerConfig,
        residents: Residents,
        pools: dict[str, WarmPool],
        devices: Devices | None,
        loader: LoaderClient | None,
        images: Images,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Without `devices` engines hold no managed memory."""
        self._config = config
        self._residents = residents
        self._pools = pools
        self.devices = devices
        self._loader = loader
        self._images = images
        self.warm = WarmBooking(pools.values(), devices)
        self._behind: dict[str, Resident] = {}
        """Models whose booking balloond did not take, by name."""
        self._sleep = sleep
        self._save_pauses = Pauses(_FIRST_SAVE_PAUSE_S, _LONGEST_SAVE_PAUSE_S)

    def has_image(self, resident: Resident) -> bool:
        """Whether the loader holds the model's weights, in host memory or on disk, according to its catalogue or to its
        answer to this group's own saving, with which the catalogue's stream may not have caught up."""
        return bool(self._image_checksums(resident))

    def _image_checksums(self, resident: Resident) -> list[str]:
        checksums = self._images.get(resident.spec.name) or resident.image_checksums
        # The catalogue may be ahead of the model that is here.
        return checksums if len(checksums) == len(self._config.devices) else []

    def _image_gone(self, resident: Resident) -> None:
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

    async def check_files(self, resident: Resident, failure: PrismError | None = None) -> None:
        """Has the loader check the model's files: before an engine is given a checkpoint, and, thoroughly, after an
        engine failed with one. Raises Unmet with the fault that the loader finds: it is in the loader's catalogue then,
        and the loader looks at the files again by itself. Raises CommandFailed if the files changed while the engine
        read them."""
        thorough, refused = failure is not None, failure is not None and at_fault(failure)
        if self._loader is None:
            return
        try:
            looked = await self._loader.look(resident.spec.name, thorough=thorough, refused=refused, timeout_s=_LOOK_S)
        except PrismError as error:  # the loader is older, away, or does not list the model
            _log.info("files not looked at", model=resident.spec.name, why=str(error))
            return
        if looked.entry.error:
            raise Unmet(looked.entry.error)
        if thorough and looked.changed:
            raise CommandFailed("its files have changed while they were read", model_at_fault=False, may_pass=True)

    async def bring_up(self, resident: Resident) -> None:
        """Brings the model to ACTIVE. The caller has to call `release_room` afterwards, for which requests do not wait.
        Raises PrismError; the resident is then as it was, hibernating or without an engine and a booking."""
        began = time.monotonic()
        resident.steps, resident.weights_from = [], []
        resident.compiling, resident.kernels_compiled = False, 0
        asleep = resident.engine is not None and resident.engine.alive
        resident.activation = traces.activation(resident, asleep, began)
        self._residents.set(resident, common_pb2.WAKING)
        taken: EngineProcess | None = None
        try:
            if not asleep:
                self._step(resident, "taking an engine")
                taken = self.pool(resident).take_idle()
            if taken is not None:
                await self.warm.lower()  # what the engine keeps counts as the model's from now on
            await self._make_room(resident)
            asleep = asleep and await self._wake(resident)
            if not asleep:
                engine, taken = taken, None
                await self._load(resident, engine)
                if resident.measured.quota_bytes:
                    await self.entitle(resident, awake=True)
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
        await self._apply_limit(resident)
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

    # --- memory

    async def _make_room(self, resident: Resident) -> None:
        if self.devices is None:
            return
        self._step(resident, "making room")
        spec = resident.spec
        if resident.asking is not None:
            await tasks.cancel(resident.asking)
        needed = self.own_room(resident) + share(spec.floor_bytes, spec)
        try:
            await self.entitle(resident, awake=True)
        except Refused:
            if not await self.warm.give_way():
                raise
            await self.entitle(resident, awake=True)
        short, where = await self.devices.make_room(
            spec.name,
            bytes=needed,
            may_retract=True,
            hold_ms=int(1e3 * _ROOM_HELD_S),
            timeout_s=_ROOM_TIMEOUT_S,
        )
        if short:
            raise Refused(
                f"{spec.name} needs {needed} bytes for weights, graphs and floor on {where}; {short} could not be freed"
            )

    async def release_room(self, resident: Resident) -> None:
        """Ends the hold on the room once the weights are there: from now on the floor is a claim like any other
        model's, not memory kept empty."""
        if self.devices is None:
            return
        try:
            await self.devices.release_room(resident.spec.name, _ROOM_TIMEOUT_S)
        except PrismError as error:
            _log.info("room is held until its time is over", model=resident.spec.name, why=str(error))

    async def _apply_limit(self, resident: Resident) -> None:
        spec = resident.spec
        limit = self._residents.operator_limits.get(spec.name)
        if limit is None and not self._config.elastic_kv:
            limit = spec.floor_bytes
        if self.devices is None or limit is None:
            return
        try:
            await self.devices.set_limit(spec.name, share(max(limit, spec.floor_bytes), spec))
        except PrismError as error:
            _log.warning("limit not set", model=resident.spec.name, why=str(error))

    def weights_room(self, resident: Resident) -> int:
        """Bytes of weights extents on each device: the measured or declared size, whichever is larger, in whole
        extents."""
        extent = self._config.weights_extent_bytes
        found = resident.measured.weights_bytes or share(resident.elsewhere.weights_bytes, resident.spec)
        weights = max(share(resident.spec.weights_bytes, resident.spec), found)
        return -(-weights // extent) * extent

    def own_room(self, resident: Resident) -> int:
        """Bytes of weights and CUDA graphs on each device. Graphs count as far as they were measured, here or
        elsewhere: the first time they take what is free."""
        return self.weights_room(resident) + self._graphs(resident)

    def _graphs(self, resident: Resident) -> int:
        if resident.measured.weights_bytes:
            return resident.measured.graph_bytes
        return share(resident.elsewhere.graph_bytes, resident.spec)

    def quota(self, resident: Resident, awake: bool) -> int:
        """Bytes that an engine takes of each device for itself. Asleep: what it was found to keep. Awake: what it
        measured, unless the catalogue states a quota. An engine that has yet to build the model may take more for a
        moment, but is booked no less than the last one needed: a shortage would be found only once all of the model is
        there. The default quota includes room for unknown graphs, so that known graphs, which are booked themselves,
        are taken off it."""
        spec, engine = resident.spec, resident.engine
        stated = share(spec.quota_bytes, spec)
        measured = resident.measured.quota_bytes if spec.quota_is_default else 0
        if engine is None or not engine.alive:
            if not spec.quota_is_default:
                return stated
            known = measured or share(resident.elsewhere.quota_bytes, spec)
            return max(stated - self._graphs(resident), known)
        if not awake and resident.kept_bytes:
            return resident.kept_bytes
        return measured or stated

    async def undo(self, resident: Resident, asleep: bool) -> None:
        """Puts a model that did not come up back as it was before, asleep or without an engine."""
        engine = resident.engine
        if asleep and engine is not None and engine.alive:
            # The engine is still asleep: its failed wake-up rolled its mappings back.
            await self.rebook(resident, awake=False)
            self._residents.set(resident, common_pb2.HIBERNATING)
            return
        if engine is not None:
            await self.release_engine(resident, engine)
        await self.drop_booking(resident)

    async def entitle(self, resident: Resident, awake: bool) -> None:
        """Books for a model that has, or gets, an engine: weights and floor only while it is awake. Raises Refused, and
        other PrismErrors."""
        if self.devices is None:
            return
        spec = resident.spec
        await self.devices.book(
            spec.name,
            quota_bytes=self.quota(resident, awake),
            weights_bytes=self.own_room(resident) if awake else 0,
            floor_bytes=share(spec.floor_bytes, spec) if awake else 0,
        )

    def book_kept(self, resident: Resident, engine: EngineProcess) -> None:
        """Books what a model that fell asleep keeps of the devices, once its engine has reported it. On a CPU engines
        never do."""
        if self._config.devices[0].startswith("cuda"):
            work = self._book_kept(resident, engine)
            resident.asking = tasks.spawn(work, f"what {resident.spec.name} keeps")

    async def _book_kept(self, resident: Resident, engine: EngineProcess) -> None:
        await self.within(engine.told_kept.wait())
        resident.kept_bytes = engine.kept_bytes + _KEPT_SPARE_BYTES
        await self.rebook(resident, awake=False)

    def book_again(self) -> None:
        """Books everything again: a balloond whose keeper died as well knows of the models only what their engines
        showed."""
        self.warm.forget()
        for resident in self._residents:
            if resident.engine is not None and resident.change is None:
                self._rebook_soon(resident)

    async def rebook(self, resident: Resident, awake: bool) -> None:
        """Books where no caller depends on the result: if balloond is away, the booking is repeated when it is back."""
        try:
            await self.entitle(resident, awake)
        except PrismError as error:
            _log.warning("booking not renewed", model=resident.spec.name, why=str(error))
            self._behind[resident.spec.name] = resident

    def catch_up(self) -> None:
        """Repeats the bookings that balloond did not take, of models for which no change under way does so."""
        behind, self._behind = self._behind, {}
        for name, resident in behind.items():
            if self._residents.get(name) is resident and resident.engine is not None:
                if resident.change is not None:
                    self._behind[name] = resident
                else:
                    self._rebook_soon(resident)

    def _rebook_soon(self, resident: Resident) -> None:
        awake = resident.residency == common_pb2.ACTIVE
        tasks.spawn(self.rebook(resident, awake), f"book {resident.spec.name} again")

    def books(self, name: str) -> bool:
        """Whether this group books, or may book, under this name: a model's, or that of idle engines."""
        resident = self._residents.get(name)
        in_use = resident is not None and (resident.engine is not None or resident.change is not None)
        return in_use or self.warm.books(name)

    async def drop_booking(self, resident: Resident, unless: Callable[[], bool] = lambda: False) -> None:
        if resident.asking is not None:
            await tasks.cancel(resident.asking)
        if self.devices is not None:
            await self.devices.drop(resident.spec.name, unless)

    # --- engine and weights

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
        self._step(resident, "mapping weights")
        command = self._command(resident, engine, engine_pb2.ToEngine(wake=engine_pb2.Wake()))
        try:
            await self._fill_from_image(resident, engine, command)
            await self._finish(resident, command)
        except (PrismError, asyncio.CancelledError) as error:
            if command.ended:
                raise
            await self.release_engine(resident, engine)
            if not isinstance(error, (Unmet, NotFound)):
                raise
            _log.warning("cannot wake", model=resident.spec.name, why=str(error))
            self._image_gone(resident)
            return False
        return True

    async def _load(self, resident: Resident, engine: EngineProcess | None) -> None:
        """Loads the model into this engine of the pool, or into one that is started."""
        if engine is None:
            self._step(resident, "taking an engine")
            pool = self.pool(resident)
            if not pool.has_started_one and not resident.compiling:
                resident.compiling = True
                self._residents.set(resident, common_pb2.WAKING)  # so that placement learns of it now
            engine = await pool.take(self._config.engines.start_timeout_s)
        resident.engine, resident.loaded = engine, (resident.spec, resident.listed or resident.spec)
        from_image = self._loader is not None and self.has_image(resident)
        try:
            await self._load_into(resident, engine, from_image)
        except (Unmet, NotFound) as error:
            if not from_image:
                raise
            # The image is gone or has another shape: log it and read the checkpoint.
            _log.warning("image not used", model=resident.spec.name, why=str(error))
            self._image_gone(resident)
            await self.release_engine(resident, engine)
            resident.engine = engine = await self.pool(resident).take(self._config.engines.start_timeout_s)
            await self._load_into(resident, engine, from_image=False)

    async def _load_into(self, resident: Resident, engine: EngineProcess, from_image: bool) -> None:
        engines = self._config.engines
        devices = self._config.devices
        checksums = self._image_checksums(resident) if from_image else [""] * len(devices)
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
        self._step(resident, "building the model" if from_image else "reading the checkpoint")
        command = self._command(resident, engine, message)
        if from_image:
            await self._fill_from_image(resident, engine, command)
        else:
            resident.weights_from = [_CHECKPOINT] * len(devices)
        await self._finish(resident, command)
        if not from_image and self._loader is not None and self.devices is not None:
            self._begin_saving(resident, engine, await command.mapped())

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

    async def _fill_from_image(self, resident: Resident, engine: EngineProcess, command: Command) -> None:
        ranks = await self.within(command.mapped())
        assert self._loader is not None
        self._step(resident, "copying weights")
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
            resident.weights_from = [loaded.source for loaded in await self.within(all_of(copies))]
        except NotFound:
            # A lease is gone: the kernel reports an engine's end to balloond and to this process, in any order.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DEATH_HEARD_S):
                    await engine.dead.wait()
                raise EngineDied(f"engine {engine.pid} died while its weights arrived") from None
            raise
        self._step(resident, "verifying")
        engine.verify(command)

    async def _finish(self, resident: Resident, command: Command) -> None:
        try:
            resident.measured = await self.within(command.done())
        except CommandFailed as error:
            sources = set(resident.weights_from)
            if error.weights_differ and sources.difference((_CHECKPOINT, _IMAGE)):
                # Any of several parts may be wrong, but the image is more likely to be right.
                resident.image_only = True
            elif error.weights_differ and _IMAGE in sources:
                _log.warning("image dropped: its weights do not verify", model=resident.spec.name, why=str(error))
                await self._drop_image(resident)
                self._image_gone(resident)
            else:
                raise
            raise WeightsDoubted(str(error)) from None

    async def within(self, work: Awaitable[T], extra_s: float = 0.0) -> T:
        """Awaits `work` within the time of one residency command. Raises TimedOut."""
        limit_s = self._config.engines.load_timeout_s + extra_s
        try:
            async with asyncio.timeout(limit_s):
                return await work
        except TimeoutError:
            raise TimedOut(f"not done within {limit_s:.0f} s") from None

    def _begin_saving(self, resident: Resident, engine: EngineProcess, weights: list[engine_pb2.WeightsMapped]) -> None:
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
                self._begin_saving(resident, engine, weights)
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
        """Drops an image that is not whole, and so of no use."""
        assert self._loader is not None
        try:
            await self._loader.drop_image(resident.spec.name)
        except PrismError as error:
            _log.warning("parts of an image stay", model=resident.spec.name, why=str(error))

    def _step(self, resident: Resident, step: str) -> None:
        resident.steps.append((step, time.monotonic()))
        self._residents.tell(resident, common_pb2.Progress(step=step, total=1, unit="steps"))


def at_fault(error: Exception) -> bool:
    """Whether an activation failed because of the model itself, so that trying again cannot help."""
    return isinstance(error, CommandFailed) and error.model_at_fault


def may_pass(error: Exception) -> bool:
    """Whether an activation failed because of the host, for a reason that may be gone in a moment."""
    return isinstance(error, CommandFailed) and error.may_pass


def worth_another_try(error: Exception) -> bool:
    """Whether the engine was at fault, or a device that gave the weights: another engine, or the image, may do
    better."""
    return isinstance(error, (EngineDied, WeightsDoubted))
