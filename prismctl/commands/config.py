"""`prismctl config validate`: whether configuration files are such that the services can use them. `prismctl config
settings`: the settings that they may have."""

from __future__ import annotations

import os
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic
import typer

from balloond.config import BalloondConfig
from deploy.node.consistency import SERVICES, ConfigFile, disagreements
from gateway.access.keys import KeysFile, repeated
from gateway.config import GatewayConfig
from gpu_scheduler.config import GpuSchedulerConfig
from loader.catalogue.catalogue import CatalogueEntry, CatalogueFile
from loader.catalogue.models import CatalogueModel, Sizes, adapter_fault, read_model
from loader.config import LoaderConfig
from placement.config import PlacementConfig
from prismctl import cli
from prismctl.system import reference
from prismctl.system.system import NO, USAGE, failed
from prismctl.views.terminal import Json, show_json, width
from services.runtime.config import Config, ConfigSection, Fault, faults, without_removed
from services.wording.toml_lines import line_of

app = cli.app("Configuration files.")
_KINDS: dict[str, tuple[type[ConfigSection], str]] = {
    "balloond": (BalloondConfig, "node"),
    "loader": (LoaderConfig, "catalogue"),
    "gpu_scheduler": (GpuSchedulerConfig, "group"),
    "placement": (PlacementConfig, "groups"),
    "gateway": (GatewayConfig, "http"),
    "catalogue": (CatalogueFile, "model"),
    "keys": (KeysFile, "key"),
}
"""Kind of file -> (its schema, a key that no other kind has)."""
_NAMED = ("context_tokens", "floor_tokens")
"""Keys of a catalogue's entry that may not suit the model's folder: a fault names them with their value."""


@dataclass
class _File:
    path: str
    text: str
    kind: str = ""
    parsed: ConfigSection | None = None
    faults: list[Fault] = field(default_factory=list)
    warnings: list[Fault] = field(default_factory=list)
    """Settings that have no effect any more."""

    def told(self, fault: Fault) -> dict[str, Any]:
        line = line_of(self.text, fault.at) if self.kind else None
        return {"file": self.path, "line": line, "key": fault.key if fault.at else None, "problem": fault.what}


@cli.command(app, "prismctl config validate /etc/prism/balloond.toml /etc/prism/loader.toml", "validate")
def validate(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Settings files (TOML) of the services of one node.")
    ],
    as_: Annotated[str, typer.Option("--as", metavar="KIND", help="Kind of the files: " + ", ".join(_KINDS))] = "",
    folders: Annotated[bool, typer.Option(help="Look into the folders of a catalogue's models.")] = True,
    json_: Json = False,
) -> None:
    """Check configuration files as the services themselves do, the catalogue with its models' folders, and whether
    they agree with each other. What a file is its name says (balloond.toml, gpu-scheduler-0.toml, catalogue.toml), or
    its keys. Status 1 with file, line and key of each fault. Settings that were removed are warnings: such a file can
    be used."""
    if as_ and as_ not in _KINDS:
        raise typer.BadParameter(f"--as is one of {', '.join(_KINDS)}, not {as_!r}")
    try:
        read = [_File(path, Path(path).read_text()) for path in files]
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        raise failed(f"{getattr(error, 'filename', None) or 'a file'}: {why}", USAGE) from None
    for file in read:
        _check(file, as_)
    _check_together(read, folders)
    found = [file.told(fault) for file in read for fault in file.faults]
    warnings = [file.told(warning) for file in read for warning in file.warnings]
    if json_:
        files_ = {file.path: file.kind or None for file in read}
        show_json({"valid": not found, "files": files_, "faults": found, "warnings": warnings})
    else:
        for each in [*found, *warnings]:
            place = f"{each['file']}:{each['line']}" if each["line"] else each["file"]
            typer.echo(": ".join(filter(None, (place, each["key"], each["problem"]))))
        for file in read:
            if not file.faults:
                typer.echo(f"{file.path}: a {file.kind} that can be used")
    if found:
        raise typer.Exit(NO)


@cli.command(app, "prismctl config settings gateway", "settings")
def settings(
    service: Annotated[str, typer.Argument(metavar="SERVICE", help=", ".join(SERVICES))] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of docs/operate/settings.md.")] = False,
    json_: Json = False,
) -> None:
    """What may be in the configuration of a service, or of all: each key with its type, its default and what it is
    for."""
    if service and service not in SERVICES:
        raise typer.BadParameter(f"SERVICE is one of {', '.join(SERVICES)}, not {service!r}")
    if markdown and (service or json_):
        raise typer.BadParameter("--markdown is all of it, and stands alone")
    sections = reference.of_service(service) if service else reference.of_all()
    if markdown:
        typer.echo(reference.as_markdown(sections), nl=False)
    elif json_:
        show_json([asdict(section) for section in sections])
    else:
        typer.echo(reference.as_text(sections, width()))


def _check(file: _File, as_: str) -> None:
    """Checks one file by itself."""
    try:
        values = tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        file.faults.append(Fault((), f"not TOML: {error}"))
        return
    file.kind = as_ or _kind(file.path, values)
    if not file.kind:
        kinds = ", ".join(_KINDS)
        file.faults.append(Fault((), f"neither its name nor its keys say what it is; name it with --as: {kinds}"))
        return
    try:
        values, file.warnings = without_removed(_KINDS[file.kind][0], values)
        file.parsed = _KINDS[file.kind][0].model_validate(values)
    except pydantic.ValidationError as error:
        file.faults += faults(error, _KINDS[file.kind][0])
    if isinstance(file.parsed, KeysFile):
        file.faults += repeated(file.parsed)


def _kind(path: str, values: dict[str, Any]) -> str:
    name = Path(path).stem.replace("-", "_")
    named = [kind for kind in _KINDS if name == kind or name.startswith(f"{kind}_")]
    keyed = [kind for kind, (_, key) in _KINDS.items() if key in values]
    return (named or keyed or [""])[0]


def _check_together(read: list[_File], folders: bool) -> None:
    by_path = {file.path: file for file in read}
    given = [ConfigFile(file.path, file.parsed) for file in read if isinstance(file.parsed, Config)]
    for path, fault in disagreements(given):
        by_path[path].faults.append(fault)
    loaders = [each.config for each in given if isinstance(each.config, LoaderConfig)]
    for file in read:
        if isinstance(file.parsed, CatalogueFile) and folders:
            file.faults += _models(file, _sizes(loaders))


def _sizes(loaders: list[LoaderConfig]) -> Sizes:
    """Sizes of the loader whose configuration is given; otherwise a loader's default sizes."""
    if loaders:
        return Sizes(loaders[0].device_dtype_bytes, loaders[0].kv_extent_bytes, loaders[0].engine_quota_bytes)
    fields = LoaderConfig.model_fields
    return Sizes(
        fields["device_dtype_bytes"].default, fields["kv_extent_bytes"].default, fields["engine_quota_bytes"].default
    )


def _models(file: _File, sizes: Sizes) -> list[Fault]:
    """Faults that the loader would find in the models' folders."""
    assert isinstance(file.parsed, CatalogueFile)
    models: dict[str, CatalogueModel] = {}
    for listed in file.parsed.model:
        folder = Path(os.path.abspath(file.path)).parent / os.path.expanduser(listed.path)
        models[listed.name] = read_model(listed.model_copy(update={"path": os.path.normpath(folder)}), sizes)
    faults = [adapter_fault(each, models) if each.listed.base else each.error for each in models.values()]
    return [
        Fault(("model", number, _key(models[name].listed, fault)), f"{name}: {fault}")
        for number, (name, fault) in enumerate(zip(models, faults, strict=True))
        if fault
    ]


def _key(listed: CatalogueEntry, fault: str) -> str:
    """The key of a catalogue's entry that a fault is about: one that it names, else the folder's."""
    return next((key for key in _NAMED if f"{key} {getattr(listed, key)}" in fault), "path")
