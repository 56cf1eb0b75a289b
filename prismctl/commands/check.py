"""`prismctl models check`: what a folder's model is and needs, before any of it is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.local.models import sizes
from kv_kinds import wording
from loader.catalogue.catalogue import CatalogueEntry
from loader.catalogue.models import CatalogueModel, read_model
from loader.checkpoints.adapter_folder import is_adapter
from loader.checkpoints.architectures.classes import CLASSES
from loader.checkpoints.architectures.kv_of_config import kv_of_folder
from prismctl.commands.models import absolute, listed
from prismctl.system.system import SystemAddresses
from prismctl.views.terminal import Json, show_json
from protos import placement_pb2
from services.errors import PrismError, Unavailable
from services.wording.sizes import size

_NAME, _BASE = "checked", "its-base"


def check(
    context: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Hugging Face folder of the model, on this machine.")],
    devices: Annotated[
        int, typer.Option(help="Number of devices of a group that the model is spread over: 1, 2 or 4.")
    ] = 1,
    context_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of the longest request, fewer than the checkpoint's to need less memory.",
            show_default="the checkpoint's",
        ),
    ] = 0,
    kv_dtype: Annotated[str, typer.Option(help="fp8: KV of one byte a value, on GPUs.")] = "",
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept a class that nobody has compared with another implementation.")
    ] = False,
    on_cpu: Annotated[
        bool | None,
        typer.Option(
            "--cpu/--gpu",
            help="Kind of the devices. Left out: that of the running system's groups; GPUs, if no system answers.",
            show_default=False,
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Say what a folder's model is and needs. Reads its small files and the headers of its weights, and loads nothing:
    class, quantisation, bytes of weights and KV, which groups of a running system could hold it, or why it is
    refused, with exit status 1."""
    path = absolute(folder)
    entry = listed(
        name=_NAME,
        path=path,
        devices=devices,
        context_tokens=context_tokens,
        kv_dtype=kv_dtype,
        unverified=unverified,
        base=_BASE if is_adapter(path) else "",
    )
    groups, groups_unknown = _groups(context.obj)
    if on_cpu is None:
        on_cpu = bool(groups) and all(map(_is_of_cpus, groups))
    model = read_model(entry, sizes(on_gpus=not on_cpu))
    found = _facts(path, model)
    if model.checkpoint is not None:
        found["on"] = "cpu" if on_cpu else "gpu"
        fitting = [each.group for each in groups if _fits(each, entry, found["device_bytes"], on_cpu=on_cpu)]
        found["groups"], found["groups_unknown"] = fitting, groups_unknown
    if json_:
        show_json(found)
    else:
        typer.echo("\n".join(_lines(found)))
    if model.error:
        raise typer.Exit(1)


def _facts(path: str, model: CatalogueModel) -> dict[str, Any]:
    checkpoint, adapter = model.checkpoint, model.adapter
    if adapter is not None:
        return {
            "path": path,
            "served": True,
            "rank": adapter.rank,
            "layers": len(adapter.layers),
            "changes": [each.name for each in adapter.linears],
            "weights_bytes": adapter.elements * model.sizes.dtype_bytes,
        }
    if checkpoint is None:
        refused = {"path": path, "served": False, "why": model.error, "devices": model.listed.devices}
        return {**refused, **_kv_of_refused(path, model)}
    known = CLASSES.get(checkpoint.architecture)
    return {
        "path": path,
        "served": True,
        "architecture": checkpoint.architecture,
        "models": known.models if known else "",
        "unverified": not checkpoint.verified,
        "compared_on": list(known.verified) if known else [],
        "quantisation": checkpoint.quantisation,
        "compared_quantised": known is not None and checkpoint.quantisation in known.quantised,
        "devices": model.listed.devices,
        "layers": checkpoint.layers,
        "weights_bytes": model.weights_bytes,
        "tables_bytes": model.weights_bytes - checkpoint.weights_bytes,  # of rotary embeddings, among the weights
        "active_bytes": checkpoint.active_bytes,
        "kv_bytes_per_token": checkpoint.kv_bytes_per_token,
        "kv": wording.described(checkpoint.kv),
        "kv_kinds": wording.listed(checkpoint.kv),
        "context_tokens": model.context_tokens,
        "floor_bytes": model.floor_bytes,
        "quota_bytes": model.quota_bytes,
        "device_bytes": model.weights_bytes + model.floor_bytes + model.quota_bytes,
    }


def _kv_of_refused(path: str, model: CatalogueModel) -> dict[str, Any]:
    """The KV that a refused model would have; empty if its config.json does not say."""
    layout = kv_of_folder(Path(path), model.sizes.dtype_bytes, model.listed.devices)
    return {"kv": wording.described(layout), "kv_kinds": wording.listed(layout)} if layout is not None else {}


def _is_of_cpus(group: placement_pb2.Group) -> bool:
    return bool(group.memory) and all(each.device.startswith("cpu") for each in group.memory)


def _fits(group: placement_pb2.Group, entry: CatalogueEntry, device_bytes: int, *, on_cpu: bool) -> bool:
    """Whether a group could hold the model, if others made room."""
    return (
        group.reachable
        and not group.drained
        and len(group.memory) == entry.devices
        and _is_of_cpus(group) == on_cpu
        and entry.devices * device_bytes <= group.capacity_bytes
    )


def _groups(system: SystemAddresses) -> tuple[list[placement_pb2.Group], str]:
    """(groups of the running system, why they are not known)."""

    async def ask() -> list[placement_pb2.Group]:
        async with system.open_placement() as placement:
            return list((await placement.cluster()).groups)

    try:
        return asyncio.run(ask()), ""
    except Unavailable:
        return [], "no system answers here"
    except PrismError as error:
        return [], str(error)


def _lines(found: dict[str, Any]) -> list[str]:
    if not found["served"]:
        each = " on each device" if found["devices"] > 1 else ""
        kv = [f"  KV         {found['kv']}{each}, if it were served"] if "kv" in found else []
        return [f"{found['path']}: refused: {found['why']}", *kv]
    if "rank" in found:
        return [
            f"{found['path']}: an adapter (LoRA): list it with base, the model that it is for",
            f"  changes    {', '.join(found['changes'])} of {found['layers']} layers, by rank {found['rank']}",
            f"  weights    {size(found['weights_bytes'])}",
        ]
    compared = ", ".join(found["compared_on"])
    if found["unverified"]:
        kind = f"{found['quantisation']}, " if found["quantisation"] else ""
        verified = f"{kind}UNVERIFIED: nobody has compared its answers with another implementation's"
    elif found["quantisation"]:
        verified = "compared on a GPU" if found["compared_quantised"] else "not compared yet with this class"
        verified = f"{found['quantisation']}, {verified}"
    else:
        verified = f"compared on {compared}" if compared else "not compared yet without quantisation"
    each = " on each device" if found["devices"] > 1 else ""
    active = f", {size(found['active_bytes'])} of them for each token"
    groups = (
        ", ".join(found["groups"])
        or (f"not known: {why}" if (why := found["groups_unknown"]) else "")
        or "none: too small, drained, out of reach, or of other devices"
    )
    return [
        f"{found['path']}: {found['models'] or found['architecture']}",
        f"  class      {found['architecture']}: {verified}",
        f"  weights    {size(found['weights_bytes'])}{each}"
        + (active if found["active_bytes"] < found["weights_bytes"] - found["tables_bytes"] else ""),
        f"  KV         {found['kv']}{each}, {size(found['floor_bytes'])} for one request"
        f" of {found['context_tokens']} tokens, in whole extents",
        f"  engine     {size(found['quota_bytes'])}{each} for itself until it is measured",
        f"  in all     {size(found['device_bytes'])}{each}, for an engine on {found['on'].upper()}s",
        f"  fits       {groups}",
    ]
