"""The devices that the configuration names: inspected, given a capacity, opened. What cannot work is refused here, in
one line, before anything is given out."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from balloond import backends
from balloond.backends.base import ExtentMaker
from balloond.config import BalloondConfig, DeviceConfig
from balloond.driver.connection import alive
from balloond.keeper.client import KeeperClient
from balloond.node import saved_capacity
from balloond.node.extent_pool import ExtentPool
from balloond.node.recovery import RecoveredState
from balloond.policy import capacity
from balloond.policy.capacity import DeviceHardware
from services.errors import Unavailable
from services.telemetry import log

_log = log.get(__name__)


def look(config: BalloondConfig) -> dict[str, DeviceHardware]:
    """Hardware of the node's GPUs by device name. Raises Unavailable without a driver, Unmet for a GPU that cannot be
    managed."""
    found = {device.name: _look(device.name) for device in config.devices if device.is_gpu}
    for name, hardware in found.items():
        capacity.check(name, hardware, backends.page_bytes(name))
    return found


def _look(name: str) -> DeviceHardware:
    try:
        return backends.look(name)
    except ImportError as error:
        raise Unavailable(f"{name}: {error}") from None
    except OSError as error:
        raise Unavailable(f"{name}: {error.strerror}") from None


def capacities(config: BalloondConfig, hardware: Mapping[str, DeviceHardware], found: RecoveredState) -> dict[str, int]:
    """Bytes by device that balloond may take. A device that a predecessor gave out keeps its capacity: what is free by
    now says nothing. Raises Refused if too little of a device is free."""
    known = saved_capacity.read(config.handoff)
    living = alive.anybody(config.handoff)

    def of(device: DeviceConfig) -> int:
        name = device.name
        given_out = living or found.given_out(name)
        configured = device.capacity_bytes or (known.get(name) if given_out else None)
        if configured is not None and (given_out or name not in hardware):
            return configured
        return capacity.fresh(name, hardware[name], configured, device.reserve_bytes, backends.page_bytes(name))

    return {device.name: of(device) for device in config.devices}


def most_extents(config: BalloondConfig, capacities: Mapping[str, int], keeper: KeeperClient) -> int:
    """Number of extents of which this process and the keeper may both hold a descriptor. Raises Refused when it is less
    than the GPUs can have."""
    gpus = [(capacities[device.name], device.kv_extent_bytes) for device in config.devices if device.is_gpu]
    limits = {
        "balloond": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        f"the keeper (process {keeper.pid})": resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)[0],
    }
    if gpus:
        for process, limit in limits.items():
            capacity.check_descriptors(process, gpus, limit)
        _log.info("descriptors", needed=capacity.descriptors(gpus), limit=min(limits.values()))
    return capacity.most_extents(min(limits.values()))


def open_makers(config: BalloondConfig, capacities: Mapping[str, int]) -> tuple[dict[str, ExtentMaker], dict[str, int]]:
    """The makers of the devices' extents, and the bytes that each ledger may give out once spares are set aside, both
    by device name. Raises Refused if spares take a whole capacity, Unavailable if a device gives no memory."""
    makers: dict[str, ExtentMaker] = {}
    given_out = dict(capacities)
    for device in config.devices:
        maker = backends.maker(device.name)
        if device.spares_budget:
            set_aside = device.spares_budget + maker.page_bytes
            given_out[device.name] = capacity.given_out(device.name, capacities[device.name], set_aside)
            maker = _with_spares(device, maker)
        makers[device.name] = maker
        _log.info("device", device=device.name, capacity=capacities[device.name], given_out=given_out[device.name])
    return makers, given_out


def _with_spares(device: DeviceConfig, maker: ExtentMaker) -> ExtentPool:
    try:
        return ExtentPool(maker, device.spares_budget, device.kv_extent_bytes)
    except OSError as error:
        raise Unavailable(f"{device.name}: no memory to be had: {error.strerror}") from None
