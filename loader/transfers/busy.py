"""How busy the devices are whose links could carry a copy."""

from __future__ import annotations

from collections.abc import Sequence

from services.telemetry import log

_log = log.get(__name__)


def look(devices: Sequence[str]) -> dict[str, float]:
    """Of GPUs their driver tells; the host's memory is everybody's, and nobody's link is spared there."""
    gpus = [device for device in devices if device.startswith("cuda:")]
    if not gpus:
        return {}
    from balloond.backends import cuda_hardware

    try:
        return {device: cuda_hardware.busy(int(device.partition(":")[2])) for device in gpus}
    except OSError as error:
        _log.warning("nobody says how busy the devices are", why=str(error))
        return {}
