"""Moving bytes between images and extents, one file for each kind of device."""

from __future__ import annotations

from collections.abc import Sequence

from loader.transfers.base import Busy, Transfer, TransferKind, nobody
from services.errors import Unavailable, Unmet
from services.telemetry import log

_log = log.get(__name__)


class Transfers:
    """Transfers by device name. They are made when they are first used: a kind's libraries are needed only where its
    devices are."""

    def __init__(self, devices: Sequence[str] = (), busy: Busy = nobody) -> None:
        """`devices` are those whose links may carry what goes to others of their kind; the loader takes some memory of
        each that does. `busy`: see `Busy`."""
        self._devices = tuple(devices)
        self._busy = busy
        self._kinds: dict[str, TransferKind] = {}
        self._made: dict[str, Transfer] = {}
        self._paths: dict[str, tuple[str, ...]] = {}
        self._ways: dict[tuple[str, str], bool] = {}

    def of(self, device: str) -> Transfer:
        """The transfer of a device. Raises Unmet for a device that nothing can be copied to, Unavailable without its
        libraries."""
        if device not in self._made:
            self._made[device] = self._kind(device).transfer(device, self._path(device))
        return self._made[device]

    def paths(self) -> dict[str, tuple[str, ...]]:
        """The links that fill each of the devices, its own first, as its driver reports them."""
        return {device: self._path(device) for device in self._devices}

    def has_way(self, source: str, target: str) -> bool:
        """Whether bytes go from device to device faster than from the host's memory."""
        if (source, target) not in self._ways:
            try:
                self._ways[source, target] = _kind_of(source) == _kind_of(target) and (
                    source == target or source in self._kind(target).reaching(target, [source])
                )
            except (OSError, Unavailable, Unmet) as error:
                _log.warning("link unknown", source=source, target=target, why=str(error))
                return False
        return self._ways[source, target]

    def forget(self, weights: memoryview) -> None:
        """Forgets an image that is about to be unmapped; no copy of it is under way."""
        for kind in self._kinds.values():
            kind.forget(weights)

    def _path(self, device: str) -> tuple[str, ...]:
        if device not in self._paths:
            others = [other for other in self._devices if other != device and _kind_of(other) == _kind_of(device)]
            try:
                links = (device, *self._kind(device).reaching(device, others))
            except (OSError, Unavailable) as error:
                _log.warning("links unknown", device=device, why=str(error))
                return (device,)
            _log.info("links", device=device, links=links, beyond_reach=sorted(set(others) - set(links)))
            self._paths[device] = links
        return self._paths[device]

    def _kind(self, device: str) -> TransferKind:
        name = _kind_of(device)
        if name not in self._kinds:
            self._kinds[name] = self._make(name, device)
        return self._kinds[name]

    def _make(self, name: str, device: str) -> TransferKind:
        if name == "cuda":
            try:
                from loader.transfers.cuda import Gpus
            except ImportError as error:
                raise Unavailable(f"{device}: {error}") from None
            return Gpus(self._busy)
        if name == "cpu":
            from loader.transfers.cpu import Cpus

            return Cpus(self._busy)
        raise Unmet(f"nothing can be copied to {device!r}")


def _kind_of(device: str) -> str:
    return device.partition(":")[0]
