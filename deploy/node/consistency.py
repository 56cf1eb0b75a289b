"""Which class checks each service's settings, and whether those of one system's services agree. Pure. Each file is
taken to be fine by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from balloond.config import BalloondConfig
from gateway.config import GatewayConfig
from gpu_scheduler.config import GpuSchedulerConfig
from loader.config import LoaderConfig
from placement.config import PlacementConfig
from services.runtime.config import Config, Fault

SERVICES: dict[str, type[Config]] = {
    "balloond": BalloondConfig,
    "loader": LoaderConfig,
    "gpu_scheduler": GpuSchedulerConfig,
    "placement": PlacementConfig,
    "gateway": GatewayConfig,
}
"""Kind of service -> the class of its settings."""
_NAMES: dict[type[Config], str] = {
    BalloondConfig: "balloond",
    GpuSchedulerConfig: "gpu_scheduler",
    LoaderConfig: "loader",
    PlacementConfig: "placement",
}
_ASKED: tuple[tuple[type[Config], str, type[Config]], ...] = (
    (GatewayConfig, "placement", PlacementConfig),
    (PlacementConfig, "groups", GpuSchedulerConfig),
    (PlacementConfig, "loaders", LoaderConfig),
    (PlacementConfig, "balloond", BalloondConfig),
    (GpuSchedulerConfig, "loader", LoaderConfig),
    (GpuSchedulerConfig, "balloond", BalloondConfig),
)
"""(class of a configuration, its key with one or several addresses, class of the configuration of the service
there)."""


@dataclass(frozen=True)
class ConfigFile:
    """A file that can be used by itself."""

    path: str
    config: Config


def disagreements(given: Sequence[ConfigFile]) -> Iterator[tuple[str, Fault]]:
    """(path, fault) for everything in which a file does not agree with another one, of services of one node. A file
    that has nothing to be compared with has no fault."""
    yield from _twice(given)
    yield from _paths(given)
    yield from _devices(given)
    yield from _addresses(given)
    yield from _extents(given)


def _of(given: Iterable[ConfigFile], kind: type[Config]) -> list[tuple[str, Any]]:
    return [(each.path, each.config) for each in given if isinstance(each.config, kind)]


def _twice(given: Sequence[ConfigFile]) -> Iterator[tuple[str, Fault]]:
    """Addresses that are used twice. Only Unix sockets and loopback addresses are compared: others may be of
    containers, each of which has all ports for itself."""
    for key in ("listen", "metrics"):
        seen: dict[str, str] = {}
        for each in given:
            address = getattr(each.config, key)
            if not address.startswith(("unix:", "127.0.0.1:")):
                continue
            if address in seen:
                yield each.path, Fault((key,), f"{address} is that of {seen[address]} too")
            seen.setdefault(address, each.path)


def _paths(given: Sequence[ConfigFile]) -> Iterator[tuple[str, Fault]]:
    """Sockets that several files name and that differ from balloond's: its own file counts."""
    for path, balloond in _of(given, BalloondConfig):
        others = [(other, config, "handoff") for other, config in _of(given, LoaderConfig)]
        others += [(other, config, "balloond_handoff") for other, config in _of(given, GpuSchedulerConfig)]
        others += [(other, config, "keeper") for other, config in _of(given, LoaderConfig)]
        for other, config, key in others:
            has, wants = getattr(config, key), balloond.keeper if key == "keeper" else balloond.handoff
            if has and has != wants:
                yield other, Fault((key,), f"{has} is not {wants}, which {path} names")


def _devices(given: Sequence[ConfigFile]) -> Iterator[tuple[str, Fault]]:
    managed = {device.name for _, balloond in _of(given, BalloondConfig) for device in balloond.devices}
    owners: dict[str, str] = {}
    for path, group in _of(given, GpuSchedulerConfig):
        for number, device in enumerate(group.devices):
            at = ("devices", number)
            if managed and group.balloond and device not in managed:
                yield path, Fault(at, f"balloond does not manage {device}; it has {', '.join(sorted(managed))}")
            if device in owners:
                yield path, Fault(at, f"{device} is in the group of {owners[device]} too")
            owners.setdefault(device, path)


def _addresses(given: Sequence[ConfigFile]) -> Iterator[tuple[str, Fault]]:
    """Addresses of services at which none of these files listens. Only Unix sockets can be checked: an address of the
    network has several names."""
    for kind, key, asked in _ASKED:
        listen = {config.listen for _, config in _of(given, asked)}
        for path, config in _of(given, kind):
            value = getattr(config, key)
            places = {(key,): value} if isinstance(value, str) else {(key, i): each for i, each in enumerate(value)}
            for at, address in places.items():
                if listen and address.startswith("unix:") and address not in listen:
                    yield path, Fault(at, f"no {_NAMES[asked]} of these files listens on {address}")


def _extents(given: Sequence[ConfigFile]) -> Iterator[tuple[str, Fault]]:
    for path, loader in _of(given, LoaderConfig):
        for other, group in _of(given, GpuSchedulerConfig):
            if loader.kv_extent_bytes != group.kv_extent_bytes:
                what = f"{loader.kv_extent_bytes} is not the {group.kv_extent_bytes} of the engines of {other}"
                yield path, Fault(("kv_extent_bytes",), f"{what}: floors would not be whole extents")
    for path, balloond in _of(given, BalloondConfig):
        for number, device in enumerate(balloond.devices):
            for other, group in _of(given, GpuSchedulerConfig):
                if device.is_gpu and device.name in group.devices and device.kv_extent_bytes != group.kv_extent_bytes:
                    what = f"{device.kv_extent_bytes} is not the {group.kv_extent_bytes} of the engines of {other}"
                    at = ("devices", number, "kv_extent_bytes")
                    yield path, Fault(at, f"{what}: descriptors would be counted wrongly")
