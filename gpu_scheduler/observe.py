"""Follows the streams that a group's decisions rest on: balloond's ledger and the loader's catalogue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from balloond.client import BalloondClient
from gpu_scheduler.memory.devices import Devices
from gpu_scheduler.memory.group_memory import GroupMemory
from gpu_scheduler.policy.memory.demand import changed
from gpu_scheduler.queue.dispatcher import Dispatcher
from gpu_scheduler.residents import Images, Residents
from loader.client import LoaderClient
from services.errors import PrismError
from services.rpc.watch import Watched
from services.telemetry import log

_log = log.get(__name__)
_DEMAND_EVERY_S = 1.0
_LEFT_OVER_EVERY_S = 1.0


async def follow_balloond(
    balloond: BalloondClient,
    memory: GroupMemory,
    dispatcher: Dispatcher,
    changes: Watched[None],
    on_return: Callable[[], None],
) -> None:
    """Keeps `memory` up to date, for ever. `on_return`: called when a balloond is there again, which may know less than
    the one before."""
    async for state in balloond.watch():
        if state is None:
            memory.lost("balloond is away")
        else:
            if memory.known and memory.away:
                on_return()
            memory.update(state.devices, state.node)
            dispatcher.changed()
        changes.set(None)


async def tell_demand(devices: Devices, memory: GroupMemory, demand: Callable[[], dict[str, float]]) -> None:
    """Reports the models' shares of demand to balloond whenever they have changed, for ever. balloond takes memory of
    decodes from models that hold more than their share."""
    told: dict[str, float] = {}
    while True:
        await asyncio.sleep(_DEMAND_EVERY_S)
        if memory.away:
            told = {}  # the next balloond does not know it
            continue
        now = demand()
        if changed(told, now):
            try:
                await devices.set_demand(now)
                told = now
            except PrismError as error:
                _log.info("demand not reported", why=str(error))


async def drop_left_over(
    devices: Devices, memory: GroupMemory, ours: Callable[[str], bool], catch_up: Callable[[], None]
) -> None:
    """Drops bookings that are not `ours`, for ever: no other process knows that they are not needed. Calls `catch_up`
    before that: balloond can take now what it did not take while it was away."""
    while True:
        await asyncio.sleep(_LEFT_OVER_EVERY_S)
        if not memory.away:
            catch_up()
            await devices.drop_left_over(memory.states, ours)


async def follow_loader(
    loader: LoaderClient,
    images: Images,
    residents: Residents,
    on_read: Callable[[], None],
    changes: Watched[None],
) -> None:
    """Keeps `images` and what `residents` know of the catalogue up to date, for ever: images in host memory, and those
    on disk, which the loader reads when they are loaded. While the loader is away the last state is kept. `on_read` is
    called when files may have been read afresh."""
    async for catalogue in loader.watch():
        if catalogue is None:
            continue
        images.clear()
        residents.heard_catalogue({entry.model.name: entry.model for entry in catalogue.entries if not entry.error})
        for entry in catalogue.entries:
            if entry.has_image or entry.on_disk:
                images[entry.model.name] = [entry.image_checksum, *entry.other_checksums]
        residents.readings = {entry.model.name: entry.reading for entry in catalogue.entries}
        on_read()
        changes.set(None)
