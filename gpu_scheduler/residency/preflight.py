"""Checks before an activation for which other models make way, so that none makes way in vain.

The arithmetic is that by which balloond will book or refuse: what it has booked now, less what the models that make way
will give up; engines are counted likewise. Faults that only show later (an engine that dies, a checkpoint that cannot
be read) are not found here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from balloond.client import WARM_ENGINES
from gpu_scheduler.engines.warm_pool import WarmPool
from gpu_scheduler.residency.bookings import Bookings
from gpu_scheduler.residency.weights import Weights
from gpu_scheduler.residents import Resident
from protos import balloond_pb2, common_pb2
from services.errors import Refused
from services.wording.plurals import agreeing

Leaving = Mapping[str, tuple[Resident, common_pb2.Residency]]
"""Models that make way, by name, and the residency that each is brought to."""


async def check(
    resident: Resident,
    leaving: Leaving,
    bookings: Bookings,
    weights: Weights,
    pool_of: Callable[[Resident], WarmPool],
) -> None:
    """Checks that `resident` could be activated after the models in `leaving` made way. Raises Refused with the
    arithmetic, Unmet, and Unavailable while balloond is away."""
    able = {name: each for name, each in leaving.items() if _obeys(*each)}
    pool = pool_of(resident)
    if resident.engine is None or not resident.engine.alive:
        lets_go = [r for r, target in able.values() if r.engine is not None and not _sleeps(weights, r, target)]
        pool.check_limit(sum(pool_of(r) is pool for r in lets_go))
    kept = {
        name: bookings.entitlement(each, awake=False).total_bytes if _sleeps(weights, each, target) else 0
        for name, (each, target) in able.items()
    }
    name, needed = resident.spec.name, bookings.entitlement(resident, awake=True).total_bytes
    for state in await bookings.states():
        others = sum(
            min(_total(booking), kept.get(booking.model, _total(booking)))
            for booking in state.bookings
            if booking.model not in (name, WARM_ENGINES)
        )
        if others + needed > state.capacity_bytes:
            raise Refused(
                f"{name} needs {needed:,} bytes of {state.device}; when {len(able)} of {len(leaving)} "
                f"{agreeing(len(able), 'has', 'have')} made way others keep {others:,} of {state.capacity_bytes:,}, so "
                "none makes way"
            )


def _obeys(resident: Resident, target: common_pb2.Residency) -> bool:
    return resident.change is None or resident.change.target == target


def _sleeps(weights: Weights, resident: Resident, target: common_pb2.Residency) -> bool:
    """Whether the model's engine stays, asleep."""
    has_image = weights.has_image(resident) or resident.saving is not None
    return target == common_pb2.HIBERNATING and (has_image or resident.residency == common_pb2.HIBERNATING)


def _total(booking: balloond_pb2.Booking) -> int:
    return booking.quota_bytes + booking.weights_bytes + booking.floor_bytes
