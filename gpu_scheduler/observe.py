"""Following the streams that a group decides from: balloond's ledger and the loader's images."""

from __future__ import annotations

from balloond.client import BalloondClient
from gpu_scheduler.dispatcher import Dispatcher
from gpu_scheduler.memory import DeviceMemory
from loader.client import LoaderClient
from services.watch import Watched


async def follow_balloond(
    balloond: BalloondClient, memory: DeviceMemory, dispatcher: Dispatcher, changes: Watched[None]
) -> None:
    """Keeps `memory` fresh, for ever."""
    async for state in balloond.watch():
        if state is None:
            memory.lost("balloond is away")
        else:
            for device in state.devices:
                if device.device == memory.device:
                    memory.update(device)
            dispatcher.changed()
        changes.set(None)


async def follow_loader(loader: LoaderClient, images: dict[str, str]) -> None:
    """Keeps `images` (model -> checksum of its image) fresh, for ever. While the loader is away the last is kept."""
    async for catalogue in loader.watch():
        if catalogue is None:
            continue
        images.clear()
        images.update({entry.model.name: entry.image_checksum for entry in catalogue.entries if entry.has_image})
