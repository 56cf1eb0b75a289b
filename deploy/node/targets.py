"""Where the services of a described node lie under each of the things that start them, and what is wrong with its
description for one of these. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pydantic

from deploy.node.consistency import SERVICES, ConfigFile, disagreements
from deploy.node.description import TABLES, DescribedModel, NodeDescription
from deploy.node.services import Layout, NetworkLayout, NodeService, port, services
from services.runtime.config import Fault, faults
from services.wording import addresses
from services.wording.plurals import counted

RUN = "/run/prism"
MODELS = "/models"
"""Folder of the models in containers."""
KEYS = "/etc/prism-keys"
"""Folder of the file of keys in containers."""
_PUBLIC = "127.0.0.1:8001"
_METRICS = 9100
_ANY: Mapping[str, Mapping[str, Any]] = {"cpu": {"cpu:0": {"capacity_bytes": 1 << 30}}, "cuda": {"cuda:0": {}}}
"""What stands for the devices of a machine while a description is checked."""
_DRAIN_S = {"gpu_scheduler": {"drain_s": 25}, "gateway": {"drain_s": 60}}
"""What runs may move away when it is stopped, or end; open streams may end. Units and pods allow for it."""
_DISK_BYTES = {True: 500_000_000_000, False: 1 << 30}
_ALL_HOSTS = {"0.0.0.0", "[::]"}
_WIRING = dict.fromkeys(("name", "listen"), "")
MADE: Mapping[str, Mapping[str, str]] = {
    "balloond": {**_WIRING, "node": "node", "devices": "devices", "keeper": "", "handoff": ""},
    "loader": {**_WIRING, "catalogue": "models", "keeper": "", "handoff": ""},
    "gpu_scheduler": {
        **_WIRING,
        **dict.fromkeys(("group", "devices"), "devices"),
        **dict.fromkeys(("balloond", "balloond_handoff", "loader"), ""),
    },
    "placement": {**_WIRING, "groups": "", "loaders": "", "balloond": ""},
    "gateway": {**_WIRING, "http": "http", "listen": "grpc", "keys_file": "keys_file", "placement": ""},
}
"""Kind of service -> its settings that follow from the description, and the key there that they are made of; empty:
of how services find each other. The service's table may not have them."""


@dataclass(frozen=True)
class RenderTarget:
    """Something that starts the services of a node."""

    layout: Callable[[NodeDescription], Layout]
    in_containers: bool = False
    on_this_machine: bool = False
    """Whether it runs where the description is read, so that devices may be whatever is there."""

    def keys_file(self, node: NodeDescription) -> str:
        """Where the gateway sees the file of keys; empty if there is none."""
        inside = self.in_containers and node.keys_file
        return f"{KEYS}/{PurePosixPath(node.keys_file).name}" if inside else node.keys_file

    def services(self, node: NodeDescription) -> list[NodeService]:
        """The services in the order of their starts, as yet unchecked."""
        groups = [_ANY.get(next(iter(group)), group) for group in node.groups]
        return services(groups, self.layout(node), node.own(self.keys_file(node)))

    def catalogue(self, node: NodeDescription) -> dict[str, Any]:
        """What the catalogue file says."""
        return {"model": node.entries(MODELS if self.in_containers else None)}


def _systemd(node: NodeDescription) -> Layout:
    base = _METRICS if node.metrics_port is None else node.metrics_port
    host = "0.0.0.0" if node.nodes else "127.0.0.1"

    def metrics(number: int, name: str) -> str:
        return f"{host}:{port(base, name)}" if base and port(base, name) else ""

    # Of the group prism, of which prism-gateway is one.
    shared = {} if node.nodes else {"socket_mode": "0660"}
    own: dict[str, Mapping[str, Any]] = {
        "gpu_scheduler": {**shared, **_DRAIN_S["gpu_scheduler"]},
        "placement": shared,
        "gateway": {"http": node.http, "listen": node.grpc or _PUBLIC, **_DRAIN_S["gateway"]},
    }
    catalogue = "/etc/prism/catalogue.toml"
    if node.nodes:
        name = node.node or "${NODE_NAME}"
        return NetworkLayout(RUN, catalogue, node=name, metrics=metrics, own=own, hosts=node.nodes)
    return Layout(RUN, catalogue, node=node.node or "node-0", metrics=metrics, own=own)


def _compose(node: NodeDescription) -> Layout:
    disk = {"disk_folder": "/var/lib/prism/images", "disk_capacity_bytes": _DISK_BYTES[node.on_gpus]}
    grpc = {"listen": node.grpc if node.grpc.startswith("unix:") else "0.0.0.0:8001"} if node.grpc else {}
    own = {"loader": disk, "gateway": {"http": "0.0.0.0:8000", **grpc, **_DRAIN_S["gateway"]}}
    return Layout(
        RUN,
        "/etc/prism/catalogue.toml",
        node=node.node or "node-0",
        # A container has all ports for itself; the gateway's metrics are at its HTTP API.
        metrics=lambda number, name: "" if name == "gateway" else f"0.0.0.0:{_METRICS}",
        own=own,
    )


def _kubernetes(node: NodeDescription) -> Layout:
    return NetworkLayout(
        RUN,
        "/etc/prism-catalogue/catalogue.toml",
        metrics=lambda number, name: f"0.0.0.0:{port(_METRICS, name)}" if port(_METRICS, name) else "",
        own={**_DRAIN_S, "gateway": {"http": "0.0.0.0:8000", **_DRAIN_S["gateway"]}},
        hosts=["dns:prism-node"],
        placement_host="prism-placement",
    )


def _serve(node: NodeDescription) -> Layout:
    grpc = {"listen": node.grpc} if node.grpc else {}
    base = node.metrics_port
    return Layout(
        RUN,
        f"{RUN}/models.toml",
        kept=RUN,
        node="local",
        metrics=lambda number, name: f"127.0.0.1:{base + number}" if base else "",
        own={"gateway": {"http": node.http, **grpc}},
    )


TARGETS = {
    "systemd": RenderTarget(_systemd),
    "compose": RenderTarget(_compose, in_containers=True),
    "kubernetes": RenderTarget(_kubernetes, in_containers=True),
}
"""What files are rendered for."""
SERVE = RenderTarget(_serve, on_this_machine=True)
"""`prism serve`, as far as it can be checked without a machine."""


def described_faults(node: NodeDescription, target: RenderTarget) -> list[Fault]:
    """What is wrong with the description for this target, by the checks of each service too."""
    # Groups with the same settings have the same faults.
    return list(dict.fromkeys([*_own_faults(node, target), *_faults_of_services(node, target)]))


def _own_faults(node: NodeDescription, target: RenderTarget) -> Iterator[Fault]:
    for kind, table in TABLES.items():
        for key in getattr(node, table):
            if (place := MADE[kind].get(key)) is not None:
                made_of = f"write {place}, which it is made of" if place else "services find each other by it"
                yield Fault((table, key), f"has no place here: {made_of}")
    yield from _faults_of_ports(node, target)
    for number, model in enumerate(node.models):
        if (why := _without_group(model, node, target)) is not None:
            yield Fault(("models", number), why)
    if target.on_this_machine:
        if (why := _fault_of_state(node)) is not None:
            yield Fault(("state",), why)
        for number, name in node.whole_machine():
            if node.devices[number].model_fields_set - {"name"}:
                yield Fault(("devices", number), f'"{name}" is whatever there is: settings are for "{name}:0"')
    else:
        for number, name in node.whole_machine():
            yield Fault(("devices", number), f'"{name}" is whatever a machine has, for prism serve: write "{name}:0"')
    if target.in_containers:
        for number, model in node.outside():
            yield Fault(("models", number), f"{node.folder(model)} is not below models_folder, {node.models_folder}")
        if node.gateway.get("usage_file"):
            yield Fault(("gateway", "usage_file"), "a container of the gateway has no folder that it could be kept in")
    devices = [device for group in node.groups for device in group]
    if target is TARGETS["kubernetes"] and {*devices} != {f"cuda:{number}" for number in range(len(devices))}:
        yield Fault(("devices",), "a pod has the GPUs that it claims, and sees them as cuda:0, cuda:1 and so on")
    if node.nodes and target is not TARGETS["systemd"]:
        yield Fault(("nodes",), "is for systemd only: Kubernetes has its own list, and others have one node")


def _fault_of_state(node: NodeDescription) -> str | None:
    """Why the sockets of `prism serve` cannot lie in the folder that the description names; None if they can."""
    try:
        for group in node.groups if node.state else ():
            addresses.socket_path(f"{node.state}/gpu_scheduler-{'+'.join(group).replace(':', '-')}.sock")
    except ValueError:
        return "it is too long a path for Unix sockets"
    return None


def _without_group(model: DescribedModel, node: NodeDescription, target: RenderTarget) -> str | None:
    """Why no group of devices can serve the model; None if one can, or the machine or another model decides."""
    if model.base or (target.on_this_machine and (not node.devices or node.wanted == "cpu")):
        return None
    sizes = {len(group) for group in node.groups}
    if model.devices in sizes:
        return None
    return f"{model.called} is for groups of {counted(model.devices, 'device')} (devices), and there is none"


def _faults_of_ports(node: NodeDescription, target: RenderTarget) -> Iterator[Fault]:
    """Addresses of which two cannot be listened on at once."""
    if target is TARGETS["kubernetes"]:
        return
    taken: list[tuple[str, str, str]] = []
    there = [("http", "", node.http), ("grpc", "", node.grpc)]
    if not target.in_containers:
        services = target.services(node)
        there += [("", service.name, service.settings["listen"]) for service in services if service.kind != "gateway"]
        there += [
            ("metrics_port", f" of {service.name}", service.settings["metrics"])
            for service in services
            if "metrics" in service.settings
        ]
    for key, of, address in there:
        host, _, port = address.rpartition(":")
        if not port.isdecimal() or port == "0" or address.startswith("unix:"):
            continue
        for other_key, other_host, other_port in taken:
            if port == other_port and (host == other_host or {host, other_host} & _ALL_HOSTS):
                yield Fault((key,) if key else (), f"{address}{of} is the port of {other_key} too")
        taken.append((key or of, host, port))


def _faults_of_services(node: NodeDescription, target: RenderTarget) -> Iterator[Fault]:
    made = {service.name: service for service in target.services(node)}
    good = []
    for service in made.values():
        kind = SERVICES[service.kind]
        try:
            good.append(ConfigFile(service.name, kind.model_validate(service.settings)))
        except pydantic.ValidationError as error:
            for fault in faults(error, kind):
                yield _at_its_place(node, service, fault)
    if len(good) == len(made):
        for name, fault in disagreements(good):
            yield _at_its_place(node, made[name], fault)


def _at_its_place(node: NodeDescription, service: NodeService, fault: Fault) -> Fault:
    """A fault of a service's settings as one of the description."""
    table, (key, *_) = TABLES[service.kind], fault.at or ("",)
    if key in getattr(node, table):
        return Fault((table, *fault.at), fault.what)
    place = MADE[service.kind].get(str(key), "")
    return Fault((place,) if place else (), f"{service.name}: {fault.key}: {fault.what}")
