"""A catalogue made from model folders that a user names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import TypeAdapter, ValidationError

from deploy.hub import names
from deploy.local import bundled
from deploy.node.description import NodeDescription
from deploy.node.services import GPU_LOADER
from loader.catalogue import catalogue
from loader.catalogue.models import CatalogueModel, Sizes, read_model
from loader.config import LoaderConfig
from services.errors import Invalid
from services.runtime import config

_NAME = TypeAdapter[str](catalogue.Name)
_HUB = "a model of the Hugging Face hub is ORG/NAME"


def named(argument: str) -> tuple[str, Path]:
    """Name and folder in an argument: ("small", /models/small-1b) for "small=/models/small-1b"; without a name before
    the first "=" the folder's name.

    An argument with a "/" before the first "=" is a path (/v=3/small-1b, runs/v=3/m), unless that part can be a name
    and the rest begins as only paths do (org/m=/models/m), and there is no such folder. Raises Invalid if there is no
    path.
    """
    name, given, path = argument.partition("=")
    if "/" in name and (not _can_be_name(name) or not path.startswith(("/", "~", ".")) or os.path.isdir(argument)):
        name = ""
    if given and name and not path:
        raise Invalid(f"{argument!r} names no folder; write NAME=PATH")
    # Links are not followed: a model is named as its user names its folder.
    path = bundled.path_of(path if given and name else argument)
    folder = Path(os.path.abspath(os.path.expanduser(path)))
    return (name if given and name else folder.name), folder


def described(node: NodeDescription) -> list[str]:
    """The models of a description: "NAME=PATH", or "NAME=ORG/NAME" of the hub where there is no such folder."""
    found = []
    for model, entry in zip(node.models, node.entries(), strict=True):
        there = os.path.exists(entry["path"])
        path = bundled.path_of(model.path) if not there and model.path in bundled.BUNDLED else entry["path"]
        found.append(f"{model.called}={path if there or model.hub_model is None else model.hub_model}")
    return found


def write_catalogue(
    models: Sequence[str], path: Path, sizes: Sizes, more: Mapping[str, Mapping[str, Any]] | None = None
) -> Mapping[str, str]:
    """Writes a catalogue file at `path` that lists the models ("PATH" or "NAME=PATH"). `more`: by name, what
    else it says of a model, which is checked by it. Returns, by name, the faults of models that cannot be served: the
    loader finds them too, and the others are served. Raises Invalid with a line for each if none can be served, and
    with one line for a name that is not allowed or comes twice."""
    entries = [named(argument) for argument in models]
    _check_names(entries)
    listed = [{**(more or {}).get(name, {}), "name": name, "path": str(folder)} for name, folder in entries]
    faults = {str(entry["name"]): fault for entry in listed if (fault := _fault(entry, sizes))}
    for argument, (name, folder) in zip(models, entries, strict=True):
        if "/" not in argument and name in faults and not folder.exists():
            faults[name] += f"; {_HUB}"
    if len(faults) == len(entries):
        raise Invalid("no model can be served:" + "".join(f"\n  {name}: {fault}" for name, fault in faults.items()))
    try:
        path.write_text(tomli_w.dumps({"model": listed}), encoding="utf-8")
        catalogue.read(path)
    except ValueError as error:
        raise Invalid(f"the models cannot be listed: {error}") from None
    return faults


def sizes(*, on_gpus: bool) -> Sizes:
    """Sizes that the loader of a local system takes for models whose entries give none."""
    fields = ("device_dtype_bytes", "kv_extent_bytes", "engine_quota_bytes")
    if on_gpus:
        return Sizes(*(GPU_LOADER[field] for field in fields))
    return Sizes(*(LoaderConfig.model_fields[field].default for field in fields))


def read_all(path: Path) -> list[CatalogueModel]:
    """The models of a catalogue file, as a loader on the CPU reads them. Raises Invalid for a file that cannot be
    used."""
    try:
        return [read_model(listed, sizes(on_gpus=False)) for listed in catalogue.read(path)]
    except ValueError as error:
        raise Invalid(str(error)) from None


def check_names(models: Sequence[str]) -> None:
    """Checks names of models as a user writes them, those of the hub included, before any is fetched. Raises Invalid
    for one that is not allowed or comes twice."""
    _check_names([names.of_argument(argument) or named(argument) for argument in models])


def _check_names(entries: Sequence[tuple[str, Path | names.HubModel]]) -> None:
    folders: dict[str, Path | names.HubModel] = {}
    for name, folder in entries:
        if not _can_be_name(name):
            raise Invalid(f"{name!r} cannot be the name of a model, of {folder}: give it another as NAME=PATH")
        if name in folders:
            where = " and ".join(dict.fromkeys((str(folders[name]), str(folder))))
            raise Invalid(f"the name {name!r} is given twice, for {where}: give names as NAME=PATH")
        folders[name] = folder


def _can_be_name(text: str) -> bool:
    try:
        _NAME.validate_python(text)
    except ValidationError:
        return False
    return True


def _fault(entry: Mapping[str, Any], sizes: Sizes) -> str:
    """Why a model cannot be served as its entry says, with the path of its folder; empty if it can."""
    try:
        why = read_model(catalogue.CatalogueEntry(**entry), sizes).error
    except ValidationError as error:
        raise Invalid("\n".join(f"{entry['name']}: {fault.what}" for fault in config.faults(error))) from None
    return why if not why or entry["path"] in why else f"{entry['path']}: {why}"
