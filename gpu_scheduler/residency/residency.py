"""Changes of residency: one at a time for each model, joined by callers that want the same, followed by any number of
callers.

Bringing a model up is `activator.py`. Bringing it down: no request starts any more, running ones may finish for a
while, the rest is handed back; then the engine lets go of the device's memory (HIBERNATING) or of the model (COLD,
ON_DISK). An engine that died is replaced here: its model is brought up again at once, because it was in use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from gpu_scheduler.config import GpuSchedulerConfig
from gpu_scheduler.engines.engine import EngineDied, EngineProcess
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.memory.devices import count
from gpu_scheduler.queue.dispatcher import NOT_HERE, Dispatcher
from gpu_scheduler.residency import preflight
from gpu_scheduler.residency.activator import Activator, at_fault, may_pass, worth_another_try
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residency.handover import Handover
from gpu_scheduler.residency.weights import Weights
from gpu_scheduler.residents import ResidencyChange, Resident, Residents
from kv_kinds import messages as kv_messages
from kv_kinds.layout import of_tokens
from protos import common_pb2, engine_pb2, gpu_scheduler_pb2
from services.errors import Conflict, Invalid, PrismError, TimedOut, Unmet
from services.rpc.watch import Watched
from services.runtime import tasks
from services.runtime.pauses import Pauses
from services.telemetry import log
from services.wording.plurals import counted

_log = log.get(__name__)
_TRIES = 3
"""Attempts at an activation whose engine died, or could not use the weights that it was given: by a device, then by the
image. The checkpoint is the last source."""
_DOWN = (common_pb2.HIBERNATING, common_pb2.COLD, common_pb2.ON_DISK)
_MOST_DEATHS = 8
"""Engines of one model that may die in a row: more than one fatal request can cause, because a request is resumed four
times at most. Then the model is in ERROR, until it is brought up or _ERROR_REST_S have passed."""
_STEADY_S = 60.0
"""Seconds of service after which an engine's death starts a new row."""
_ERROR_REST_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
"""Shortest and longest seconds that a model is in ERROR for a fault of the host that may pass. A request that comes
after that brings it up, for which other models may have to make way."""
_UNKNOWN = gpu_scheduler_pb2.Elsewhere()
_MOST_BYTES = 1 << 48
"""Bound of any byte count of a model: an engine plans its addresses by these numbers."""


def _check_sizes(spec: common_pb2.ModelSpec, elsewhere: gpu_scheduler_pb2.Elsewhere) -> None:
    """Raises Invalid if a byte count of the model is negative or too large."""
    sizes = {
        "weights_bytes": spec.weights_bytes,
        "quota_bytes": spec.quota_bytes,
        "floor_bytes": spec.floor_bytes,
        "graph_bytes elsewhere": elsewhere.graph_bytes,
        "quota_bytes elsewhere": elsewhere.quota_bytes,
        "weights_bytes elsewhere": elsewhere.weights_bytes,
        "KV of its longest request": _longest_bytes(spec),
    }
    for what, nbytes in sizes.items():
        if not 0 <= nbytes < _MOST_BYTES:
            raise Invalid(f"{spec.name}: {what} cannot be {nbytes} bytes")


def _longest_bytes(spec: common_pb2.ModelSpec) -> int:
    """Bytes of KV of the model's longest request, on all its devices. Raises Invalid for kinds that there are not, and
    for a context below zero."""
    if spec.context_tokens < 0:
        raise Invalid(f"{spec.name}: its context cannot be {spec.context_tokens} tokens")
    try:
        return (kv_messages.layout(spec) or of_tokens(1)).bytes_of(spec.context_tokens)
    except ValueError as error:
        raise Invalid(f"{spec.name}: {error}") from None


class ResidencyController:
    """Carries out SetResidency for a group."""

    def __init__(
        self,
        config: GpuSchedulerConfig,
        residents: Residents,
        dispatcher: Dispatcher,
        activation: Activator,
        bookings: Bookings,
        weights: Weights,
        handover: Handover,
        pools: dict[str, WarmPool],
        later: Callable[..., asyncio.TimerHandle] | None = None,
        *,
        most_deaths: int = _MOST_DEATHS,
    ) -> None:
        """`later`: calls a function after that many seconds; None: the event loop's `call_later`. `most_deaths`:
        engines of one model that may die in a row; then the model is in ERROR."""
        self._config = config
        self._residents = residents
        self._dispatcher = dispatcher
        self._activation = activation
        self._bookings = bookings
        self._weights = weights
        self._handover = handover
        self._pools = pools
        self._later = later
        self._most_deaths = most_deaths
        self._pauses = Pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self._closing = False

    async def close(self) -> None:
        """Called when the process ends: engines that end from now on are not replaced."""
        self._closing = True

    # --- asking for a change

    def begin(
        self,
        spec: common_pb2.ModelSpec,
        target: common_pb2.Residency,
        reason: str,
        drain_ms: int = 0,
        yields: Sequence[gpu_scheduler_pb2.Yield] = (),
        successor: str = "",
        elsewhere: gpu_scheduler_pb2.Elsewhere = _UNKNOWN,
    ) -> ResidencyChange:
        """Starts a change or joins the one under way. Raises Invalid for a model of no possible size, Conflict if the
        one under way has another target or no model comes up here any more, Unmet for an impossible target."""
        _check_sizes(spec, elsewhere)
        if target != common_pb2.ACTIVE and target not in _DOWN:
            known = target in common_pb2.Residency.values()
            name = common_pb2.Residency.Name(target) if known else target
            raise Unmet(f"{name} is not a residency to bring a model to")
        if target == common_pb2.ACTIVE and (wanted := count(spec)) != len(self._config.devices):
            here = len(self._config.devices)
            on = f"the group {self._config.group} for models on {here}"
            raise Unmet(f"{spec.name} is for {counted(wanted, 'device')}, {on}")
        if target == common_pb2.ACTIVE and not self._has_kv(spec):
            raise Unmet(
                f"{spec.name} has a floor of 0, and on {self._config.group} the KV of a model is its floor "
                "(elastic_kv = false): it could serve no request; give it floor_tokens in the catalogue, or a limit"
            )
        resident = self._residents.get(spec.name)
        if resident is not None and resident.change is not None:
            if resident.change.target == target:
                return resident.change
            under_way = common_pb2.Residency.Name(resident.change.target)
            raise Conflict(f"{spec.name} is on its way to {under_way}")
        is_up = resident is not None and resident.residency == common_pb2.ACTIVE
        if target == common_pb2.ACTIVE and not is_up:
            for so, what in ((self._residents.drained, "drained"), (self._residents.stopping, "stopping")):
                if so:  # placement will learn of it in a moment, and choose another group
                    raise Conflict(f"the group {self._config.group} is {what}: no model comes up there")
        is_told = resident is None or spec is not resident.spec
        resident = self._residents.enter(self._residents.of_this_node(spec))
        if resident.residency == common_pb2.ERROR:
            resident.deaths = 0
        if is_told:
            resident.listed = self._residents.listed.get(spec.name)
            resident.elsewhere = elsewhere
        now = gpu_scheduler_pb2.ResidencyProgress(residency=resident.residency)
        change = resident.change = ResidencyChange(target, time.monotonic(), Watched(now))
        # The route exists from now on: requests may come while the model wakes. A model whose engine has just died is
        # not active either: the next plan comes before the work below begins.
        if target == common_pb2.ACTIVE and (resident.residency != common_pb2.ACTIVE or resident.engine is None):
            self._residents.set(resident, common_pb2.WAKING)
        work = self._carry_out(resident, change, reason, drain_ms, yields, successor)
        change.task = tasks.spawn(work, f"residency of {spec.name}")
        return change

    def _has_kv(self, spec: common_pb2.ModelSpec) -> bool:
        """Whether the model may ever have KV memory here."""
        if self._config.elastic_kv or not self._config.balloond:
            return True
        return bool(spec.floor_bytes or self._residents.operator_limits.get(spec.name))

    async def follow(self, change: ResidencyChange) -> AsyncIterator[gpu_scheduler_pb2.ResidencyProgress]:
        """Yields the progress of a change until it has ended. Raises the error that it failed with, unless it ended in
        ERROR (then the last message says so)."""
        async for message in change.progress.follow():
            last = change.ended  # read before the yield: if it ends meanwhile, one more message follows
            if message.ByteSize():
                yield message
            if last:
                break
        if change.failure is not None and not (at_fault(change.failure) or may_pass(change.failure)):
            raise change.failure

    async def _carry_out(
        self,
        resident: Resident,
        change: ResidencyChange,
        reason: str,
        drain_ms: int,
        yields: Sequence[gpu_scheduler_pb2.Yield],
        successor: str,
    ) -> None:
        _log.info("residency", model=resident.spec.name, target=common_pb2.Residency.Name(change.target), reason=reason)
        try:
            if change.target == common_pb2.ACTIVE:
                await self._up(resident, yields)
            else:
                await self._down(resident, change.target, drain_ms, successor)
        except PrismError as error:
            change.failure = error
            _log.warning("residency not reached", model=resident.spec.name, path=resident.spec.path, why=str(error))
        except Exception as error:
            change.failure = PrismError(f"{type(error).__name__}: {error}")
            raise
        finally:
            resident.change = None
            change.ended = True
            change.progress.set(
                gpu_scheduler_pb2.ResidencyProgress(
                    residency=resident.residency,
                    reason=resident.reason or change.note,
                    model_at_fault=change.failure is not None and at_fault(change.failure),
                    seconds=time.monotonic() - change.began,
                )
            )
            if (engine := resident.engine) is not None and not engine.alive:
                # The engine died while the change was ending: requests may have been sent to it meanwhile.
                self._dispatcher.on_death(engine)

    # --- up

    async def _make_way(self, resident: Resident, yields: Sequence[gpu_scheduler_pb2.Yield]) -> None:
        """Brings other models down first. If one does not come down, go on: the booking shows whether there is enough
        memory."""
        for yielding in yields:
            other = self._residents.get(yielding.model)
            if other is None or other is resident:
                continue
            try:
                change = self.begin(
                    other.spec,
                    yielding.target,
                    f"makes way for {resident.spec.name}",
                    yielding.drain_ms,
                    successor=yielding.successor,
                )
                if change.task is not None:
                    await asyncio.wait([change.task])
            except PrismError as error:
                _log.warning("did not make way", model=yielding.model, why=str(error))

    async def _up(self, resident: Resident, yields: Sequence[gpu_scheduler_pb2.Yield]) -> None:
        has_engine = resident.engine is not None and resident.engine.alive
        if has_engine and resident.residency == common_pb2.ACTIVE:
            return
        if not has_engine:
            await self._check_files(resident)
        if yields:
            await self._check(resident, yields)
            await self._make_way(resident, yields)
        for attempt in range(1, _TRIES + 1):
            try:
                await self._activation.bring_up(resident)
                break
            except PrismError as error:
                if worth_another_try(error) and attempt < _TRIES:
                    _log.warning("trying again", model=resident.spec.name, why=str(error))
                    continue
                if at_fault(error) or may_pass(error):
                    await self._check_files(resident, error)
                self._could_not(resident, error)
                raise
        self._pauses.forget(resident.spec.name)
        engine = resident.engine
        assert engine is not None
        # Nothing was awaited since the model became active: no request can have reached the engine yet.
        engine.listener = self._dispatcher
        await self._release_room(resident, engine)

    async def _release_room(self, resident: Resident, engine: EngineProcess) -> None:
        """Releases the activation's room; stops waiting when the engine dies, because it is replaced only when the
        change has ended, and requests wait for that."""
        release = tasks.spawn(self._bookings.release_room(resident), f"release room of {resident.spec.name}")
        death = tasks.spawn(engine.dead.wait(), f"death of the engine of {resident.spec.name}")
        try:
            await asyncio.wait([release, death], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await tasks.cancel(release, death)

    async def _check_files(self, resident: Resident, failure: PrismError | None = None) -> None:
        """Raises the fault that the loader finds in the model's files, thoroughly if an engine failed with them
        (`failure`). The resident is then as it was."""
        try:
            await self._weights.check_files(resident, thorough=failure is not None, refused=at_fault(failure))
        except PrismError as error:
            await self._activation.undo(resident, asleep=False)
            self._could_not(resident, error)
            raise

    async def _check(self, resident: Resident, yields: Sequence[gpu_scheduler_pb2.Yield]) -> None:
        """Called before any model makes way: raises the error that would refuse the activation all the same. The
        resident is then as it was."""
        others = ((self._residents.get(each.model), each.target) for each in yields)
        leaving = {
            other.spec.name: (other, target) for other, target in others if other is not None and other is not resident
        }
        try:
            await preflight.check(resident, leaving, self._bookings, self._weights, self._activation.pool)
        except PrismError as error:
            await self._activation.undo(resident, asleep=resident.engine is not None)
            self._could_not(resident, error)
            raise

    def _could_not(self, resident: Resident, error: PrismError) -> None:
        # Nothing is wrong with the requests: their gateways try elsewhere, or here again when there is memory.
        self._dispatcher.hand_back(resident.spec.name, f"{NOT_HERE}: {error}")
        if may_pass(error):
            self._in_error(resident, str(error), self._pauses.failed(resident.spec.name))
        elif at_fault(error):
            self._in_error(resident, str(error))
        elif isinstance(error, EngineDied) and resident.engine is None:
            why = f"{counted(_TRIES, 'engine')} ended one after the other as the model came up: {error}"
            self._in_error(resident, why, self._pauses.failed(resident.spec.name))
        elif resident.engine is None:
            self._residents.leave(resident)

    def _in_error(self, resident: Resident, reason: str, for_s: float = 0.0) -> None:
        """Puts the model in ERROR for `for_s` seconds; 0: until its files are read afresh, or it is brought up or
        down."""
        if resident.rest is not None:
            resident.rest.cancel()
            resident.rest = None
        resident.retry_s, resident.reading = for_s, self._residents.readings.get(resident.spec.name, 0)
        self._residents.set(resident, common_pb2.ERROR, reason)
        if for_s:
            later = self._later or asyncio.get_running_loop().call_later
            resident.rest = later(for_s, self._rested, resident)

    def files_read(self) -> None:
        """The loader has read files afresh: models in ERROR because of their old files are in it no longer."""
        for resident in self._residents:
            name = resident.spec.name
            if self._residents.readings.get(name, resident.reading) != resident.reading:
                if resident.residency == common_pb2.ERROR and resident.change is None:
                    self._pauses.forget(name)
                    self._residents.leave(resident)

    # --- down

    async def _down(self, resident: Resident, target: common_pb2.Residency, drain_ms: int, successor: str) -> None:
        engine = resident.engine
        if engine is None:
            self._residents.leave(resident)
            return
        if resident.residency == common_pb2.HIBERNATING and target == common_pb2.HIBERNATING:
            return
        if resident.residency != common_pb2.HIBERNATING:
            try:
                await self._drain(resident, engine, drain_ms, successor)
            except (EngineDied, TimedOut):
                # The engine runs nothing any more, or does not even answer: the model has left.
                await engine.give_up()
                await self._let_go(resident, engine)
                if target == common_pb2.HIBERNATING:
                    raise
                return
        if target == common_pb2.HIBERNATING:
            await self._hibernate(resident, engine)
        else:
            await self._let_go(resident, engine)

    async def _let_go(self, resident: Resident, engine: EngineProcess) -> None:
        await self._activation.release_engine(resident, engine)
        await self._bookings.drop(resident)
        self._residents.leave(resident)

    async def _drain(self, resident: Resident, engine: EngineProcess, drain_ms: int, successor: str) -> None:
        self._residents.set(resident, common_pb2.DRAINING)
        self._dispatcher.hand_back(resident.spec.name)
        if successor and (given := await self._handover.give(resident, engine, successor)) is not None:
            self._dispatcher.go_on_at(given, successor)
            drain_ms = 0
        command = engine.command(engine_pb2.ToEngine(drain=engine_pb2.Drain(finish_ms=drain_ms)))
        await tasks.within(command.done(), self._config.engines.load_timeout_s + drain_ms / 1e3)

    async def _hibernate(self, resident: Resident, engine: EngineProcess) -> None:
        if resident.saving is not None:
            await asyncio.wait([resident.saving])
        if not self._weights.has_image(resident):
            # Without an image the weights would be lost: let the engine go instead.
            why = self._weights.why_no_image(resident)
            _log.warning(
                "no image to sleep on; the engine is given back, and the next start reads the checkpoint",
                model=resident.spec.name,
                why=why,
                last_cold_start_s=round(resident.cold_s, 1),
            )
            await self._let_go(resident, engine)
            if resident.change is not None:
                resident.change.note = why
            return
        engine.told_kept.clear()
        command = engine.command(engine_pb2.ToEngine(hibernate=engine_pb2.Hibernate()))
        try:
            await tasks.within(command.done(), self._config.engines.load_timeout_s)
        except PrismError:
            # The engine is awake and drained; only a fresh start makes it serve again.
            await self._let_go(resident, engine)
            raise
        await self._bookings.rebook(resident, awake=False)
        self._residents.set(resident, common_pb2.HIBERNATING)
        self._bookings.book_kept(resident, engine)

    # --- engines that die

    def engine_died(self, engine: EngineProcess) -> None:
        """Replaces a dead engine, whose requests were failed already: its model is brought up again in another engine,
        unless a change is under way, which fails by itself or looks at its engine when it has ended."""
        resident = self._residents.of_engine(engine)
        for pool in self._pools.values():
            pool.give_back(engine)
        if resident is None or resident.change is not None or self._closing:
            return
        was_awake = resident.residency == common_pb2.ACTIVE
        resident.deaths = 1 if resident.active_s > _STEADY_S else resident.deaths + 1
        resident.engine_gone()
        _log.warning("engine died", model=resident.spec.name, engine=engine.pid, deaths=resident.deaths)
        if not was_awake:
            # At once: a change that is requested from now on begins afresh.
            self._residents.leave(resident)
            self._drop_booking(resident)
        elif resident.deaths >= self._most_deaths:
            self._give_up(resident, f"{resident.deaths} engines died in a row")
        else:
            try:
                self.begin(resident.spec, common_pb2.ACTIVE, "its engine died")
            except PrismError as error:  # the model may not come up here any more
                self._give_up(resident, str(error))

    def _give_up(self, resident: Resident, reason: str) -> None:
        self._dispatcher.hand_back(resident.spec.name, reason)
        self._in_error(resident, reason, _ERROR_REST_S)
        self._drop_booking(resident)

    def _rested(self, resident: Resident) -> None:
        if resident.residency == common_pb2.ERROR and resident.change is None:
            self._residents.leave(resident)

    def _drop_booking(self, resident: Resident) -> None:
        """Drops the booking of a model without an engine, unless it gets one meanwhile."""

        def has_use() -> bool:
            now = self._residents.get(resident.spec.name)
            return now is not None and (now.engine is not None or now.change is not None)

        tasks.spawn(self._bookings.drop(resident, unless=has_use), f"forget {resident.spec.name}")
