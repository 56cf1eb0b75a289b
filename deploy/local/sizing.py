"""Memory of CPU devices if the user names none: what the models of the catalogue need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from deploy.local.devices import MIB
from loader.catalogue.models import CatalogueModel, Models, adapter_room
from services.errors import Unavailable

SMALL = ((27,), (13,))
"""MiB of the devices that the demonstration models share; `Local.devices` says why."""
_MORE = 1 / 8
"""Share of what models need that is added for the KV of several requests at once."""


@dataclass(frozen=True)
class SizedDevices:
    """Devices that were sized for models."""

    mib: Sequence[Sequence[int]]
    """MiB of each device of each group."""
    needed_mib: int = 0
    """MiB that the models need together; 0 for `SMALL`."""

    def __str__(self) -> str:
        groups = ", ".join("+".join(f"{mib:,}" for mib in group) for group in self.mib)
        return f"CPU devices: {groups} MiB, as the models need {self.needed_mib:,} MiB together"


def sized(models: Sequence[CatalogueModel], free_bytes: int) -> SizedDevices:
    """`SMALL` if each model alone fits its larger device. Otherwise a group for each number of devices that models are
    spread over, which holds all of them at once; if that would be more than half of the host's `free_bytes`, the group
    is smaller and holds each of them alone. Models with an error are left out. Raises Unavailable if the host has not
    enough free for one of them."""
    by_name = {model.listed.name: model for model in models}
    known = [model for model in models if model.checkpoint is not None]
    mib = {model.listed.name: needed_mib(model, by_name) for model in known}
    if all(model.listed.devices == 1 and mib[model.listed.name] <= max(SMALL)[0] for model in known):
        return SizedDevices(SMALL)
    largest = max(known, key=lambda model: mib[model.listed.name] * model.listed.devices)
    most = mib[largest.listed.name] * largest.listed.devices
    if most * MIB > free_bytes:
        raise Unavailable(
            f"{largest.listed.name} needs {most:,} MiB on the CPU, where weights and KV are float32, and the host has "
            f"{free_bytes // MIB:,} MiB free; a smaller context_tokens in a catalogue makes its KV smaller, and "
            "--device-mib is taken as it is"
        )
    spreads = sorted({model.listed.devices for model in known})
    each = {spread: [mib[model.listed.name] for model in known if model.listed.devices == spread] for spread in spreads}
    needed = sum(spread * sum(needs) for spread, needs in each.items())
    share = min(1 + _MORE, free_bytes / 2 / (needed * MIB))
    return SizedDevices([[max(int(share * sum(needs)), *needs)] * spread for spread, needs in each.items()], needed)


def needed_mib(model: CatalogueModel, models: Models = MappingProxyType({})) -> int:
    """MiB that a model needs on each of its devices: weights, room for its adapters among `models`, the KV of its
    longest request, its engine's quota."""
    assert model.checkpoint is not None
    room = adapter_room(model, models)
    weights = model.weights_bytes + (0 if room is None else room.nbytes)
    return -(-(weights + model.floor_bytes + model.quota_bytes) // MIB)
