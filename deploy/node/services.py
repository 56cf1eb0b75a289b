"""The services of a node, each with its settings. Pure.

Whatever starts them (a terminal, systemd, compose, Kubernetes) says where they lie (`Layout`); how they find each other
follows from that, and is written here only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
GPU_DTYPE_BYTES = 2
GPU_LOADER = {"device_dtype_bytes": GPU_DTYPE_BYTES, "kv_extent_bytes": 8 * MIB, "engine_quota_bytes": 3 << 30}
"""Settings of a loader for engines on GPUs: 16-bit weights and KV, extents of this size, and so many bytes for context,
graphs and workspaces."""
_IMAGES_BYTES = {True: 64 << 30, False: 256 * MIB}
"""Most bytes of weight images in host memory, with devices that are GPUs or not."""
_ENGINES = {True: 16, False: 4}
"""Most engine processes of a group, hibernating ones included, with devices that are GPUs or not."""

Settings = Mapping[str, Any]
Devices = Mapping[str, Settings]
"""Name of a device -> its settings in balloond's file, beside the name."""


@dataclass(frozen=True)
class NodeService:
    """One process of a node that reads a configuration file."""

    name: str
    kind: str
    """Module that runs it: `python -m KIND --config FILE`."""
    settings: dict[str, Any]
    """What its file says."""
    after: tuple[str, ...]
    """Names of the services that are healthy before it starts; "keeper", which has no file, is one."""


def numbered(number: int, group: str) -> str:
    """Name of the gpu_scheduler of a group: its place among the groups."""
    return f"gpu-scheduler-{number}"


def no_metrics(number: int, name: str) -> str:
    return ""


@dataclass(frozen=True)
class Layout:
    """Where the services of a node lie: all behind Unix sockets in one folder."""

    run: str
    """Folder of the sockets."""
    catalogue: str
    """Path of the catalogue file."""
    kept: str = "/var/lib/prism"
    """Folder of placement's for what outlives it."""
    node: str = "node-0"
    scheduler: Callable[[int, str], str] = numbered
    """Name of the gpu_scheduler of the group with this number and name."""
    metrics: Callable[[int, str], str] = no_metrics
    """Address of the metrics of the service with this number, in the order of their starts, and name; empty: none."""
    own: Mapping[str, Settings] = field(default_factory=dict)
    """Kind of service -> settings that it has here because of what starts it."""

    def group(self, devices: Sequence[str]) -> str:
        """Name of the group of these devices, unique among all groups that one placement knows."""
        return "+".join(devices)

    def listen(self, name: str) -> str:
        """Address that a service listens on."""
        return f"unix:{self.run}/{name}.sock"

    def beside(self, name: str) -> str:
        """Address of a service for the others of its node."""
        return self.listen(name)

    def members(self, name: str) -> list[str]:
        """Addresses for placement of the service that has this name on each node."""
        return [self.listen(name)]

    @property
    def placement(self) -> str:
        """Address of placement for gateways."""
        return self.listen("placement")


def stop_s(settings: Settings) -> int:
    """Seconds that a service with these settings may take to stop: it drains, then what stops after it does."""
    return int(2 * settings.get("drain_s", 10) + 10)


PORTS = {"balloond": 1, "loader": 2, "placement": 3}
_FIRST_SCHEDULER = 10


def port(base: int, name: str) -> int | None:
    """Port of a service in the row that begins at `base`; None: it has none there."""
    if name.startswith("gpu-scheduler-"):
        return base + _FIRST_SCHEDULER + int(name.rpartition("-")[2])
    return base + PORTS[name] if name in PORTS else None


@dataclass(frozen=True)
class NetworkLayout(Layout):
    """One of several nodes: the services that others ask listen on ports, the same on each node."""

    node: str = "${NODE_NAME}"
    hosts: Sequence[str] = ()
    """Hosts of the nodes as placement knows them; "dns:NAME" has the addresses of several."""
    placement_host: str = "127.0.0.1"
    """Host of placement as gateways know it."""

    def group(self, devices: Sequence[str]) -> str:
        return f"{self.node}/{super().group(devices)}"

    def listen(self, name: str) -> str:
        return f"0.0.0.0:{_network_port(name)}"

    def beside(self, name: str) -> str:
        return f"127.0.0.1:{_network_port(name)}"

    def members(self, name: str) -> list[str]:
        return [f"{host}:{_network_port(name)}" for host in self.hosts]

    @property
    def placement(self) -> str:
        return f"{self.placement_host}:{_network_port('placement')}"


def _network_port(name: str) -> int | None:
    # The gateway's, which is in no such row, follows that of its HTTP API.
    return {"placement": 7100, "gateway": 8001}.get(name) or port(7000, name)


def services(groups: Sequence[Devices], layout: Layout, own: Mapping[str, Settings]) -> list[NodeService]:
    """The services in the order of their starts. `groups`: the devices of each group. `own`: kind of service ->
    settings of the operator, which go before those that are made here; tables are merged."""
    found: list[NodeService] = []
    for number, (kind, name, after, settings) in enumerate(_wired(groups, layout)):
        common = {"name": name, "listen": layout.listen(name)}
        if metrics := layout.metrics(number, name):
            common["metrics"] = metrics
        whole = merged(merged({**common, **settings}, layout.own.get(kind, {})), own.get(kind, {}))
        found.append(NodeService(name, kind, whole, after))
    return found


def _wired(groups: Sequence[Devices], layout: Layout) -> Iterator[tuple[str, str, tuple[str, ...], dict[str, Any]]]:
    """(kind, name, the services before it, its settings) of each service."""
    keeper, handoff = f"{layout.run}/keeper.sock", f"{layout.run}/handoff.sock"
    devices = {device: settings for group in groups for device, settings in group.items()}
    on_gpus = any(device.startswith("cuda:") for device in devices)
    schedulers = {layout.scheduler(number, "+".join(group)): list(group) for number, group in enumerate(groups)}
    balloond = {
        "node": layout.node,
        "handoff": handoff,
        "keeper": keeper,
        "devices": [{"name": device, **settings} for device, settings in devices.items()],
    }
    yield "balloond", "balloond", ("keeper",), balloond
    loader = {
        "catalogue": layout.catalogue,
        "keeper": keeper,
        "handoff": handoff,
        "host_capacity_bytes": _IMAGES_BYTES[on_gpus],
        **({**GPU_LOADER, "copy_devices": list(devices)} if on_gpus else {}),
    }
    yield "loader", "loader", ("balloond",), loader
    for name, group in schedulers.items():
        scheduler = {
            "group": layout.group(group),
            "devices": group,
            "balloond": layout.beside("balloond"),
            "balloond_handoff": handoff,
            "loader": layout.beside("loader"),
            "engines": {"limit": _ENGINES[on_gpus]},
        }
        yield "gpu_scheduler", name, ("balloond", "loader"), scheduler
    placement = {
        "groups": [address for name in schedulers for address in layout.members(name)],
        "loaders": layout.members("loader"),
        "balloond": layout.members("balloond"),
        "traffic_file": f"{layout.kept}/traffic.json",
    }
    yield "placement", "placement", ("loader", *schedulers), placement
    yield "gateway", "gateway", ("placement",), {"placement": layout.placement}


def merged(settings: Settings, more: Settings) -> dict[str, Any]:
    """The settings with `more`, which counts where both say something; tables of both are merged."""
    whole = dict(settings)
    for key, value in more.items():
        old = whole.get(key)
        whole[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return whole
