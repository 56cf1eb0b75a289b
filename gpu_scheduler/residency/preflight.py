"""Checks before an activation for which other models make way, so that none makes way in vain.

The arithmetic is that by which balloond will book or refuse: what it has booked now, less what the models that make way
will give up; engines are counted likewise. Faults that only show later (an engine that dies, a checkpoint that cannot
be read) are not found here.
"""

from __future__ import annotations

from collections.abc import Mapping

from balloond.client import WARM_ENGINES
from gpu_scheduler.memory.devices import share
from gpu_scheduler.residency.activation import Activator
from gpu_scheduler.residents import Resident
from protos import balloond_pb2, common_pb2
from services.errors import Refused
from services.wording.plurals import agreeing

Leaving = Mapping[str, tuple[Resident, common_pb2.Residency]]
"""Models that make way, by name, and the residency that each is brought to."""


async def check(activation: Activator, resident: Resident, leaving: Leaving) -> None:
    """Checks that `resident` could be activated after the models in `leaving` made way. Raises Refused with the
    arithmetic, Unmet, and Unavailable while balloond is away."""
    able = {name: each for name, each in leaving.items() if _obeys(*each)}
    pool = activation.pool(resident)
    if resident.engine is None or not resident.engine.alive:
        lets_go = [r for r, target in able.values() if r.engine is not None and not _sleeps(activation, r, target)]
        pool.check_limit(sum(activation.pool(r) is pool for r in lets_go))
    if activation.devices is None:
        return
    kept = {
        name: activation.quota(each, awake=False) if _sleeps(activation, each, target) else 0
        for name, (each, target) in able.items()
    }
    spec = resident.spec
    needed = activation.quota(resident, awake=True) + activation.own_room(resident) + share(spec.floor_bytes, spec)
    for state in await activation.devices.inspect():
        others = sum(
            min(_total(booking), kept.get(booking.model, _total(booking)))
            for booking in state.bookings
            if booking.model not in (spec.name, WARM_ENGINES)
        )
        if others + needed > state.capacity_bytes:
            raise Refused(
                f"{spec.name} needs {needed} bytes of {state.device}; when {len(able)} of {len(leaving)} "
                f"{agreeing(len(able), 'has', 'have')} made way others keep {others} of {state.capacity_bytes}, so "
                "none makes way"
            )


def _obeys(resident: Resident, target: common_pb2.Residency) -> bool:
    return resident.change is None or resident.change.target == target


def _sleeps(activation: Activator, resident: Resident, target: common_pb2.Residency) -> bool:
    """Whether the model's engine stays, asleep."""
    has_image = activation.has_image(resident) or resident.saving is not None
    return target == common_pb2.HIBERNATING and (has_image or resident.residency == common_pb2.HIBERNATING)


def _total(booking: balloond_pb2.Booking) -> int:
    return booking.quota_bytes + booking.weights_bytes + booking.floor_bytes
