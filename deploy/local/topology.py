"""The processes of a local system, and their configuration files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
GPU_DTYPE_BYTES = 2
GPU_LOADER = {"device_dtype_bytes": GPU_DTYPE_BYTES, "kv_extent_bytes": 8 * MIB, "engine_quota_bytes": 3 << 30}
"""Settings of a loader for engines on GPUs: 16-bit weights and KV, extents of this size, and so many bytes for context,
graphs and workspaces."""


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
    groups: tuple[tuple[str, ...], ...] = ()
    """Groups of devices that serve models together, each model spread over all devices of its group; empty: each device
    is a group."""
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
        keeper = str(self.state / "keeper.sock")
        handoff = str(self.state / "handoff.sock")
        common: dict[str, Any] = {"log_level": self.log_level, "log_format": "json"}
        plan: list[Process] = [Process("keeper", "balloond.keeper", ("--socket", keeper), keeper)]
        ports = iter(range(self.metrics_port, self.metrics_port + 100))

        def add(name: str, module: str, after: tuple[str, ...], config: dict[str, Any]) -> None:
            config = {"name": name, "listen": self.unix(name), **common, **config}
            if self.metrics_port:
                config["metrics"] = f"127.0.0.1:{next(ports)}"
            path = self.state / f"{name}.toml"
            path.write_text(to_toml(config))
            plan.append(Process(name, module, ("--config", str(path)), config["listen"], after))

        add(
            "balloond",
            "balloond",
            ("keeper",),
            {
                "node": "local",
                "handoff": handoff,
                "keeper": keeper,
                "devices": [
                    {"name": name} | ({} if size is None else {"capacity_bytes": size})
                    for name, size in self.devices.items()
                ],
            },
        )
        add(
            "loader",
            "loader",
            ("balloond",),
            {
                "catalogue": str(self.catalogue),
                "keeper": keeper,
                "handoff": handoff,
                "host_capacity_bytes": self.host_capacity_bytes,
                **({**GPU_LOADER, "copy_devices": list(self.devices)} if self.on_gpus else {}),
                **self.loader,
            },
        )
        for group, devices in self.group_names.items():
            add(
                self.scheduler(group),
                "gpu_scheduler",
                ("balloond", "loader"),
                {
                    "group": group,
                    "devices": list(devices),
                    "balloond": self.unix("balloond"),
                    "balloond_handoff": handoff,
                    "loader": self.unix("loader"),
                    "engines": {
                        "kind": self.engine,
                        "warm": self.warm,
                        "limit": self.engines,
                        "log_level": self.engine_log_level,
                        "poison_fresh_pages": self.poison,
                        "options": self.engine_options,
                    },
                    "arbitration": self.arbitration,
                    "traces": self.traces,
                    **self.gpu_scheduler,
                },
            )
        groups = [self.scheduler(group) for group in self.group_names]
        add(
            "placement",
            "placement",
            ("loader", *groups),
            {
                "groups": [self.unix(group) for group in groups],
                "loaders": [self.unix("loader")],
                "balloond": [self.unix("balloond")],
                "idle_s": self.idle_s,
                **self.placement,
            },
        )
        add(
            "gateway",
            "gateway",
            ("placement",),
            {"http": self.http, "placement": self.unix("placement"), "traces": self.traces, **self.gateway},
        )
        return plan

    def with_groups(self, groups: Sequence[Mapping[str, int | None]]) -> Local:
        """The same system on other devices: for each group, device name -> capacity in bytes."""
        devices = {device: size for group in groups for device, size in group.items()}
        return self.with_(devices=devices, groups=tuple(tuple(group) for group in groups))

    def with_(self, **changes: Any) -> Local:
        return dataclasses.replace(self, **changes)


def to_toml(config: dict[str, Any]) -> str:
    """The configuration as TOML, the little of it that these files need. Raises TypeError."""

    def value(v: Any) -> str:
        if isinstance(v, bool):
            return str(v).lower()
        if isinstance(v, (int, float)):
            return repr(v)
        if isinstance(v, str):
            return '"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"'
        if isinstance(v, dict):
            return "{" + ", ".join(f'"{k}" = {value(x)}' for k, x in v.items()) + "}"
        if isinstance(v, (list, tuple)):
            return "[" + ", ".join(value(x) for x in v) + "]"
        raise TypeError(f"{v!r} has no place in a configuration")

    return "".join(f'"{key}" = {value(v)}\n' for key, v in config.items())
