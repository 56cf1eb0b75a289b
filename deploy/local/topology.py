"""The processes of a local system, and their configuration files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from deploy.node.services import MIB, Layout, merged, services


@dataclass(frozen=True)
class Process:
    """One service: `python -m module --config file`, healthy when `probe` answers."""

    name: str
    module: str
    arguments: tuple[str, ...]
    probe: str
    """gRPC address with health, or the path of a SEQPACKET socket that accepts."""
    after: tuple[str, ...] = ()
    """Processes that must be healthy first."""
    under: tuple[str, ...] = ()
    """A command that runs the process in its place, as `ip netns exec NAME`."""


@dataclass(frozen=True)
class Local:
    """A local system. Every socket and file is under `state`."""

    state: Path
    catalogue: Path
    http: str = "127.0.0.1:8000"
    devices: dict[str, int | None] = field(default_factory=lambda: {"cpu:0": 27 * MIB, "cpu:1": 13 * MIB})
    """Device name -> capacity in bytes; None, on a GPU: what is free. The example models need 14.5, 11 and 14 MiB
    (weights, floor, quota): together about as much as there is, and the two large ones never fit at once, so that
    models balloon, leave and return in front of the user."""
    device_settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Device name -> further settings of it, of balloond."""
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of devices that serve models together, each model spread over all devices of its group; empty: each device
    is a group."""
    kv_extent_bytes: int | None = None
    """Bytes of an extent of KV on GPUs, for all services; None: what their settings or defaults say."""
    engine: str = "sglang"
    engine_options: dict[str, str] = field(default_factory=dict)
    engines: int = 4
    """The most engine processes of a device."""
    warm: int = 1
    poison: bool = False
    log_level: str = "info"
    engine_log_level: str = "error"
    metrics_port: int = 0
    """The first of the ports for Prometheus text; 0: off (the gateway's /metrics is always there)."""
    traces: bool = False
    """Whether the gateway and the gpu_schedulers send traces, to OTEL_EXPORTER_OTLP_ENDPOINT."""
    host_capacity_bytes: int = 256 * MIB
    """The most bytes that images may take; `python -m deploy.local` gives them a share of what the host has free."""
    idle_s: float = 1.0
    arbitration: dict[str, Any] = field(default_factory=dict)
    """Settings `arbitration` of every gpu_scheduler."""
    gpu_scheduler: dict[str, Any] = field(default_factory=dict)
    """Further settings of every gpu_scheduler."""
    balloond: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)

    def unix(self, name: str) -> str:
        return f"unix:{self.state / name}.sock"

    @property
    def on_gpus(self) -> bool:
        return any(device.startswith("cuda:") for device in self.devices)

    @property
    def group_names(self) -> dict[str, tuple[str, ...]]:
        """Name of a group -> its devices, after which it is named."""
        return {"+".join(group): group for group in self.groups or [(device,) for device in self.devices]}

    def scheduler(self, group: str) -> str:
        """Name of the process that owns a group."""
        return "gpu_scheduler-" + group.replace(":", "-")

    def processes(self) -> list[Process]:
        """The processes in the order of their start; writes their configuration files."""
        layout = Layout(
            run=str(self.state),
            catalogue=str(self.catalogue),
            kept=str(self.state),
            node="local",
            scheduler=lambda number, group: self.scheduler(group),
            metrics=lambda number, name: f"127.0.0.1:{self.metrics_port + number}" if self.metrics_port else "",
        )
        sizes = {device: {} if size is None else {"capacity_bytes": size} for device, size in self.devices.items()}
        extents = self._extents()
        groups = [
            {device: {**extents, **self.device_settings.get(device, {}), **sizes[device]} for device in group}
            for group in self.group_names.values()
        ]
        keeper = str(self.state / "keeper.sock")
        plan = [Process("keeper", "balloond.keeper", ("--socket", keeper), keeper)]
        for service in services(groups, layout, self._own()):
            path = self.state / f"{service.name}.toml"
            path.write_text(tomli_w.dumps(service.settings))
            listen = service.settings["listen"]
            plan.append(Process(service.name, service.kind, ("--config", str(path)), listen, service.after))
        return plan

    def _own(self) -> dict[str, dict[str, Any]]:
        """Settings of each kind of service, beside how they find each other."""
        engines = {
            "kind": self.engine,
            "warm": self.warm,
            "limit": self.engines,
            "log_level": self.engine_log_level,
            "poison_fresh_pages": self.poison,
            **self._extents(),
            "options": self.engine_options,
        }
        made: dict[str, dict[str, Any]] = {
            "loader": {"host_capacity_bytes": self.host_capacity_bytes, **self._extents()},
            "gpu_scheduler": {"engines": engines, "arbitration": self.arbitration, "traces": self.traces},
            "placement": {"idle_s": self.idle_s},
            "gateway": {"http": self.http, "traces": self.traces},
        }
        return {
            kind: merged({"log_level": self.log_level, "log_format": "json", **made.get(kind, {})}, getattr(self, kind))
            for kind in ("balloond", "loader", "gpu_scheduler", "placement", "gateway")
        }

    def _extents(self) -> dict[str, int]:
        return {} if self.kv_extent_bytes is None else {"kv_extent_bytes": self.kv_extent_bytes}

    def with_groups(self, groups: Sequence[Mapping[str, int | None]]) -> Local:
        """The same system on other devices: for each group, device name -> capacity in bytes."""
        devices = {device: size for group in groups for device, size in group.items()}
        return self.with_(devices=devices, groups=tuple(tuple(group) for group in groups))

    def with_(self, **changes: Any) -> Local:
        return dataclasses.replace(self, **changes)
