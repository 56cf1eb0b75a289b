"""How far a model is that comes up, for a person who waits for it: asked of placement while other work goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from placement.client import PlacementClient
from protos import placement_pb2
from services.errors import PrismError
from services.runtime import tasks
from services.runtime.progress import Far, ProgressMeter
from services.wording.sizes import size

T = TypeVar("T")
_EVERY_S = 0.3


def far(model: placement_pb2.GroupModel) -> Far:
    """How far a model's activation is."""
    at = model.progress
    step = f"{model.model}: {at.step or 'waking'}"
    if model.kernels_compiled and at.unit != "kernels":
        step += f" ({model.kernels_compiled} kernels compiled)"
    if at.unit == "steps":  # one that counts nothing
        return Far(step)
    per_s, left_s = (getattr(at, name) if at.HasField(name) else None for name in ("per_s", "left_s"))
    return Far(step, at.done, at.total, at.unit, per_s, left_s)


async def meanwhile(placement: PlacementClient, model: str, work: Awaitable[T], say: Callable[[str], None]) -> T:
    """The result of `work`, which brings a model up; shows how far that is. `say` prints a line where there is no
    terminal."""
    with ProgressMeter("prismctl", say, size=size) as meter:
        telling = tasks.spawn(_tell(placement, model, meter), f"tell how far {model} is")
        try:
            return await work
        finally:
            await tasks.cancel(telling)


async def _tell(placement: PlacementClient, model: str, meter: ProgressMeter) -> None:
    """Asks for ever. What placement does not answer is for the work to say."""
    while True:
        try:
            cluster = await placement.cluster()
        except PrismError:
            cluster = placement_pb2.Cluster()
        for group in cluster.groups:
            for each in group.models:
                if each.model == model and each.waking_s:
                    meter.show(far(each))
        await asyncio.sleep(_EVERY_S)
