"""How busy the devices are whose links could carry a copy."""

from __future__ import annotations

from collections.abc import Sequence

from services.telemetry import log

_log = log.get(__name__)


def look(devices: Sequence[str]) -> dict[str, float]:
    """Part of its time, 0 to 1, that each GPU works, as its driver reports it; empty where that fails. Devices in host
    memory are left out: every process uses it, and no link is spared there."""
    gpus = [device for device in devices if device.startswith("cuda:")]
    if not gpus:
        return {}
    from balloond.backends import cuda_hardware

    try:
        return {device: cuda_hardware.busy(int(device.partition(":")[2])) for device in gpus}
    except OSError as error:
        _log.warning("no program reports how busy the devices are", why=str(error))
        return {}
