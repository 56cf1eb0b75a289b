"""balloond's bookings for the models of one group, and the memory that it makes free for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.engine import EngineProcess
from gpu_scheduler.memory.devices import Devices, share
from gpu_scheduler.memory.warm_booking import WarmBooking
from gpu_scheduler.policy.memory.entitlement import EngineSizes, Entitlement, ModelSizes, entitlement
from gpu_scheduler.policy.queue.decisions import ROOM_FOR_ACTIVATION
from gpu_scheduler.residents import Resident, Residents
from protos import balloond_pb2, common_pb2
from services.errors import PrismError, Refused
from services.runtime import tasks
from services.telemetry import log

_log = log.get(__name__)
_KEPT_SPARE_BYTES = 16 << 20
"""Bytes booked on top of what a sleeping engine reports to keep: the driver's own tables grow and shrink."""


class Bookings:
    """The bookings of one group's models, on all of its devices."""

    def __init__(
        self, config: GpuSchedulerConfig, residents: Residents, devices: Devices | None, warm: WarmBooking
    ) -> None:
        """Without `devices` engines hold no managed memory, and nothing is booked. `warm`: the booking of idle engines,
        which gives way to models."""
        self._config = config
        self._residents = residents
        self.devices = devices
        self._warm = warm
        self._behind: dict[str, Resident] = {}
        """Models whose booking balloond did not take, by name."""

    def entitlement(self, resident: Resident, awake: bool) -> Entitlement:
        """Bytes to book on each device for a model that has, or gets, an engine."""
        spec, elsewhere, measured = resident.spec, resident.elsewhere, resident.measured
        # Until an engine has measured them: buffers of adapters begin with an extent of their own.
        beside = self._config.weights_extent_bytes if spec.HasField("adapters") and not measured.weights_bytes else 0
        model = ModelSizes(
            weights_bytes=share(spec.weights_bytes, spec) + beside,
            quota_bytes=share(spec.quota_bytes, spec),
            quota_is_default=spec.quota_is_default,
            floor_bytes=share(spec.floor_bytes, spec),
            measured=EngineSizes(measured.weights_bytes, measured.graph_bytes, measured.quota_bytes),
            elsewhere=EngineSizes(
                share(elsewhere.weights_bytes, spec),
                share(elsewhere.graph_bytes, spec),
                share(elsewhere.quota_bytes, spec),
            ),
            has_engine=resident.engine is not None and resident.engine.alive,
            kept_bytes=resident.kept_bytes,
        )
        return entitlement(model, self._config.weights_extent_bytes, awake=awake)

    async def states(self) -> Sequence[balloond_pb2.DeviceState]:
        """The state of each device now, with its bookings; none without managed memory. Raises PrismError while
        balloond is away."""
        return [] if self.devices is None else await self.devices.inspect()

    async def book(self, resident: Resident, awake: bool) -> None:
        """Books what the model is entitled to. Raises Refused with the arithmetic, and other PrismErrors."""
        if self.devices is None:
            return
        wanted = self.entitlement(resident, awake)
        await self.devices.book(
            resident.spec.name,
            quota_bytes=wanted.quota_bytes,
            weights_bytes=wanted.weights_bytes,
            floor_bytes=wanted.floor_bytes,
        )

    async def drop(self, resident: Resident, unless: Callable[[], bool] = lambda: False) -> None:
        """Drops what is booked for the model, unless `unless()` is true when balloond can be asked."""
        if resident.asking is not None:
            await tasks.cancel(resident.asking)
        if self.devices is not None:
            await self.devices.drop(resident.spec.name, unless)

    def books(self, name: str) -> bool:
        """Whether this group books, or may book, under this name: a model's, or that of idle engines."""
        resident = self._residents.get(name)
        in_use = resident is not None and (resident.engine is not None or resident.change is not None)
        return in_use or self._warm.books(name)

    # --- room for an activation

    async def make_room(self, resident: Resident) -> None:
        """Books for a model that is coming up, and has balloond make room for its weights, graphs and floor. Idle
        engines of the warm pool give way. Raises Refused, and other PrismErrors."""
        if self.devices is None:
            return
        self._residents.step(resident, "making room")
        name = resident.spec.name
        if resident.asking is not None:
            await tasks.cancel(resident.asking)
        wanted = self.entitlement(resident, awake=True)
        needed = wanted.weights_bytes + wanted.floor_bytes
        try:
            await self.book(resident, awake=True)
        except Refused:
            if not await self._warm.give_way():
                raise
            await self.book(resident, awake=True)
        short, where = await self.devices.make_room(
            name,
            bytes=needed,
            may_retract=True,
            hold_ms=int(1e3 * ROOM_FOR_ACTIVATION.held_s),
            timeout_s=ROOM_FOR_ACTIVATION.timeout_s,
        )
        if short:
            raise Refused(
                f"{name} needs {needed:,} bytes for weights, graphs and floor on {where}; {short:,} could not be freed"
            )

    async def release_room(self, resident: Resident) -> None:
        """Ends the hold on the room, which is not needed once the weights are mapped: from now on the floor is a claim
        like any other model's, not memory kept empty."""
        if self.devices is None:
            return
        try:
            await self.devices.release_room(resident.spec.name, ROOM_FOR_ACTIVATION.timeout_s)
        except PrismError as error:
            _log.info("room is held until its time is over", model=resident.spec.name, why=str(error))

    async def set_limit(self, resident: Resident) -> None:
        """Sets the model's KV limit, if an operator set one, or if limits are fixed."""
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

    async def engine_taken(self) -> None:
        """Notes that a model has taken an engine of the warm pool: what that keeps counts as the model's from now on.
        Raises PrismError while balloond is away."""
        await self._warm.lower()

    # --- bookings that follow

    def book_kept(self, resident: Resident, engine: EngineProcess) -> None:
        """Books what a model that fell asleep keeps of the devices, once its engine has reported it. On a CPU engines
        never do."""
        if self._config.devices[0].startswith("cuda"):
            work = self._book_kept(resident, engine)
            resident.asking = tasks.spawn(work, f"what {resident.spec.name} keeps")

    async def _book_kept(self, resident: Resident, engine: EngineProcess) -> None:
        await tasks.within(engine.told_kept.wait(), self._config.engines.load_timeout_s)
        resident.kept_bytes = engine.kept_bytes + _KEPT_SPARE_BYTES
        await self.rebook(resident, awake=False)

    def book_again(self) -> None:
        """Books all models again, except those whose residency is changing, which book themselves: a balloond whose
        keeper died as well knows of the models only what their engines showed."""
        self._warm.forget()
        for resident in self._residents:
            if resident.engine is not None and resident.change is None:
                self._rebook_soon(resident)

    async def rebook(self, resident: Resident, awake: bool) -> None:
        """Books where no caller depends on the result: if balloond is away, the booking is repeated when it is back."""
        try:
            await self.book(resident, awake)
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
