"""The keys of `prism.toml`, the file that describes a node. `examples/prism.toml` shows them with comments."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from balloond.config import DeviceConfig
from deploy.hub import names
from loader.catalogue.catalogue import CatalogueEntry, Milliseconds, Name, check_names
from services.errors import Invalid
from services.runtime.config import ConfigSection
from services.wording.addresses import AddressOrNone, HttpAddress

TABLES = {
    "balloond": "balloond",
    "loader": "loader",
    "gpu_scheduler": "scheduler",
    "placement": "placement",
    "gateway": "gateway",
}
"""Kind of service -> the table that has its further settings."""
_DEVICES = re.compile(r"cpu|cuda|(cpu|cuda):\d+(\+(cpu|cuda):\d+)*")
_ALL_OF_A_MACHINE = ("cpu", "cuda")
_NAME = TypeAdapter[str](Name)
_FIRST_FREE_PORT = 1024
_FILES = (("gateway", "usage_file"), ("loader", "disk_folder"), ("placement", "traffic_file"))
"""(table, key) of services' settings that are paths."""


class DeviceGroup(DeviceConfig):
    """Devices that serve models together: "cuda:0" alone, or "cuda:0+cuda:1", over both of which each model is spread
    (1, 2 or 4). The other keys are of each device."""

    name: str
    """The devices, with "+" between them. `prism serve` also takes "cuda", all GPUs of the machine one by one, and
    "cpu", of a size that the models need."""

    @field_validator("name")
    @classmethod
    def _has_a_backend(cls, name: str) -> str:
        if not _DEVICES.fullmatch(name):
            raise ValueError(f'{name!r} is no device: write "cuda:0", "cuda:0+cuda:1" for a group of two, or "cpu:0"')
        devices = name.split("+")
        if twice := [device for device in devices if devices.count(device) > 1]:
            raise ValueError(f"{twice[0]} is there twice")
        return name

    @model_validator(mode="after")
    def _host_memory_has_a_size(self) -> DeviceGroup:
        """Takes the place of the same check of a device, since "cpu" has no size: `prism serve` finds one. Others are
        checked where balloond's own settings are."""
        return self

    @property
    def devices(self) -> dict[str, dict[str, Any]]:
        """Name of each device -> its settings."""
        settings = self.model_dump(exclude_unset=True, exclude={"name"})
        return {device: settings for device in self.name.split("+")}


class DescribedModel(CatalogueEntry):
    """A model. A catalogue has the same keys."""

    name: Name = ""
    """Name of the model for clients; left out: ORG/NAME for a model of the hub, else the last part of the path."""
    path: Annotated[str, Field(min_length=1)]
    """Hugging Face folder, relative to `models_folder`; or ORG/NAME or ORG/NAME@REVISION of the hub, which is the
    folder of that name once it is there."""

    @field_validator("path")
    @classmethod
    def _can_be_had(cls, path: str) -> str:
        try:
            names.parse(path)
        except Invalid as error:
            raise ValueError(str(error)) from None
        return path

    @model_validator(mode="after")
    def _path_gives_a_name(self) -> DescribedModel:
        try:
            _NAME.validate_python(self.called)
        except ValidationError:
            raise ValueError(f"{self.path!r} gives no name that a model can have: write name and path") from None
        if self.base == self.called:
            raise ValueError(f"base: {self.base!r} cannot be its own base")
        return self

    @property
    def hub_model(self) -> names.HubModel | None:
        """The model of the Hugging Face hub, if the path has the form of one's name; a folder goes before it."""
        return names.parse(self.path)

    @property
    def called(self) -> str:
        """Name of the model for clients, also where the file gives none."""
        return self.name or (self.hub_model.repository if self.hub_model else Path(self.path).name)


class TargetDefaults(ConfigSection):
    """Targets of models that name none of their own; 0: none, best effort."""

    ttft_ms: Milliseconds = 0
    """Time to first token."""
    tpot_ms: Milliseconds = 0
    """Time per output token after the first."""


class SystemdSettings(ConfigSection):
    """Settings of systemd's units alone."""

    python: str = "/opt/prism/.venv/bin/python"
    """Interpreter of the environment that has Prism, not in anybody's home."""


class KubernetesSettings(ConfigSection):
    """Settings of Kubernetes' manifests alone."""

    image: str = "prism:cuda"
    """Image of all containers."""
    gateways: int = Field(default=2, ge=1)
    """Number of gateways."""
    models_claim: str = "prism-models"
    """Name of the claim of the volume that has the models' folders."""


class ComposeSettings(ConfigSection):
    """Settings of compose's file alone."""

    image: str = ""
    """Image of all containers; empty: prism:cuda or prism:cpu, by the devices."""


def _named(values: Any, key: str) -> Any:
    """The list, with tables for its texts."""
    if not isinstance(values, list):
        return values
    return [{key: value} if isinstance(value, str) else value for value in values]


DeviceGroups = Annotated[
    list[DeviceGroup],
    BeforeValidator(lambda values: _named(values, "name"), json_schema_input_type=list[str | DeviceGroup]),
]
Models = Annotated[
    list[DescribedModel],
    BeforeValidator(lambda values: _named(values, "path"), json_schema_input_type=list[str | DescribedModel]),
]
Passthrough = dict[str, Any]


class NodeDescription(ConfigSection):
    """A node of Prism: its devices, its models and their targets, and where it is reached."""

    node: str = ""
    """Name of the node, with systemd and compose; no other of a fleet has it. Empty: "node-0", and in a fleet the
    host's name."""
    nodes: list[str] = []
    """Hosts of all nodes of a fleet, with systemd: their services listen on ports, and placement, on one of them, asks
    all. Empty: one node, behind Unix sockets."""
    devices: DeviceGroups = []
    """Groups of devices: "cuda:0", or "cuda:0+cuda:1" for models that are spread over two; or tables with `name` and
    settings such as `capacity_bytes`. Left out: "cuda:0"; for `prism serve` on a machine without a GPU "cpu"."""
    models: Models = []
    """Models: folders, relative to `models_folder`, or ORG/NAME of the Hugging Face hub; or tables with `path` and
    more. `prism serve` fetches those of the hub that are no folders there, and without any serves three tiny ones."""
    models_folder: str = ""
    """Folder of the models' folders, on the node; empty: that of this file. Containers see it as /models."""
    targets: TargetDefaults = TargetDefaults()
    http: HttpAddress = "127.0.0.1:8000"
    """Where clients reach the HTTP API. In Kubernetes: port 8000 of a Service, whatever this is."""
    grpc: AddressOrNone = ""
    """Where clients reach the gRPC API. Left out: 127.0.0.1:8001 with systemd, and a Unix socket with compose and
    `prism serve`. In Kubernetes: port 8001 of a Service."""
    metrics_port: int | None = Field(default=None, ge=0, le=65_000)
    """Beginning of the ports of 127.0.0.1 that Prometheus asks; 0: none. Left out: 9100 with systemd, none with `prism
    serve`. Containers have addresses of their own, and so fixed ports."""
    keys_file: str = ""
    """File of API keys (`prismctl keys new`), relative to this one; empty: whoever reaches the gateway may ask. Keys
    themselves have no place here."""
    state: str = ""
    """Folder of sockets, logs and generated files of `prism serve`, relative to this file; empty: its own choice. The
    others have theirs."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that services log."""
    traces: bool = False
    """Whether gateway and gpu_schedulers send traces, to OTEL_EXPORTER_OTLP_ENDPOINT."""
    systemd: SystemdSettings = SystemdSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    compose: ComposeSettings = ComposeSettings()
    balloond: Passthrough = {}
    """Further settings of balloond."""
    loader: Passthrough = {}
    """Further settings of the loader."""
    scheduler: Passthrough = {}
    """Further settings of every gpu_scheduler."""
    placement: Passthrough = {}
    """Further settings of placement."""
    gateway: Passthrough = {}
    """Further settings of the gateway."""

    @field_validator("models")
    @classmethod
    def _names_differ(cls, models: list[DescribedModel]) -> list[DescribedModel]:
        check_names(model.model_copy(update={"name": model.called}) for model in models)
        return models

    @field_validator("nodes")
    @classmethod
    def _hosts_differ(cls, hosts: list[str]) -> list[str]:
        if twice := [host for host in hosts if hosts.count(host) > 1]:
            raise ValueError(f"{twice[0]!r} is there twice")
        return hosts

    @field_validator("metrics_port")
    @classmethod
    def _is_of_anybody(cls, port: int | None) -> int | None:
        if port and port < _FIRST_FREE_PORT:
            raise ValueError(f"{port}: ports below {_FIRST_FREE_PORT} are the system's")
        return port

    @property
    def wanted(self) -> str:
        """The devices in one text, as `prism serve --device` takes them; empty: left out."""
        return ",".join(group.name for group in self.devices)

    @property
    def groups(self) -> list[dict[str, dict[str, Any]]]:
        """For each group, name of a device -> its settings."""
        return [group.devices for group in self.devices] or [{"cuda:0": {}}]

    @property
    def on_gpus(self) -> bool:
        return any(device.startswith("cuda") for group in self.groups for device in group)

    def entries(self, folder: str | None = None) -> list[dict[str, Any]]:
        """The models as a catalogue lists them, with the targets of who has none. `folder`: where `models_folder` is
        seen; None: there."""
        return [
            {
                "name": model.called,
                "path": str(self.folder(model) if folder is None else Path(folder, self._below(model))),
                **self.targets.model_dump(exclude_defaults=True),
                **model.model_dump(exclude_unset=True, exclude={"name", "path"}),
            }
            for model in self.models
        ]

    def folder(self, model: DescribedModel) -> Path:
        """Folder of the model on the node, for a model of the hub the one that it would have there."""
        return Path(os.path.normpath(Path(self.models_folder, Path(model.path).expanduser())))

    def _below(self, model: DescribedModel) -> Path:
        return self.folder(model).relative_to(self.models_folder)

    def whole_machine(self) -> Iterator[tuple[int, str]]:
        """(number, name) of groups that stand for whatever a machine has."""
        return ((number, each.name) for number, each in enumerate(self.devices) if each.name in _ALL_OF_A_MACHINE)

    def outside(self) -> Iterator[tuple[int, DescribedModel]]:
        """(number, model) of models whose folder is not below `models_folder`."""
        for number, model in enumerate(self.models):
            if not self.folder(model).is_relative_to(self.models_folder):
                yield number, model

    def own(self, keys_file: str) -> dict[str, Mapping[str, Any]]:
        """Kind of service -> its further settings, those that several have in common included. `keys_file`: where the
        gateway sees it; empty if there is none."""
        common: dict[str, Any] = {} if self.log_level == "info" else {"log_level": self.log_level}
        traces = {"traces": True} if self.traces else {}
        keys = {"keys_file": keys_file} if keys_file else {}
        made: dict[str, Mapping[str, Any]] = {"gpu_scheduler": traces, "gateway": {**keys, **traces}}
        return {kind: {**common, **made.get(kind, {}), **getattr(self, table)} for kind, table in TABLES.items()}

    def placed(self, folder: Path) -> NodeDescription:
        """A copy of this description with absolute paths. `folder`: folder of its file, to which paths are relative."""

        def absolute(path: str) -> str:
            return path if path.startswith("${") else os.path.normpath(folder / Path(path).expanduser())

        return self.model_copy(
            update={
                "models_folder": absolute(self.models_folder),
                "keys_file": self.keys_file and absolute(self.keys_file),
                "state": self.state and absolute(self.state),
                **{
                    table: getattr(self, table) | {key: absolute(path)}
                    for table, key in _FILES
                    if isinstance(path := getattr(self, table).get(key), str) and path
                },
            }
        )
