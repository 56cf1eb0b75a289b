"""`prismctl models`: the catalogue, and the images of its models. What moves them is in `steer`."""

from __future__ import annotations

import os
from typing import Annotated, Any

import pydantic
import typer

from deploy.hub import names as hub_names
from kv_kinds import wording as kv_wording
from loader.catalogue.catalogue import CatalogueEntry
from prismctl import cli
from prismctl.system.system import SystemAddresses, run
from prismctl.views import values
from prismctl.views.sizes import parse_size
from prismctl.views.tables import Column, Row, render
from prismctl.views.terminal import Json, show, show_json, show_table, width
from prismctl.views.wording import fault
from protos import common_pb2, placement_pb2
from services.errors import Invalid
from services.runtime.config import faults
from services.wording.sizes import size

app = cli.app("The catalogue, and what is done to one of its models.")
Name = Annotated[str, typer.Argument(metavar="MODEL")]
_FIELDS = (("weights", "weights_bytes"), ("floor", "floor_bytes"), ("engine quota", "quota_bytes"))


@cli.command(app, "prismctl models list --json", "list")
def list_models(context: typer.Context, json_: Json = False) -> None:
    """The catalogue: states, sizes, errors."""
    system: SystemAddresses = context.obj

    async def ask() -> placement_pb2.Routes:
        async with system.open_placement() as placement:
            return await placement.routes()

    rows = values.models(run(ask()))
    columns = (
        Column("model"),
        Column("state"),
        Column("places"),
        Column("weights", 1, right=True),
        Column("floor", 2, right=True),
        Column("context", 3, right=True),
        Column("KV/token", 4, right=True),
        Column("quota", 5, right=True),
        Column("path", 6),
        Column("aliases", 2),
    )
    lines = []
    for row in rows:
        cells = (
            row["model"]
            + (" (pinned)" if row["pinned"] else "")
            + (" (unverified)" if row["unverified"] else "")
            + (f" (adapter of {row['base']})" if row["base"] else ""),
            row["state"],
            ", ".join(row["places"]),
            size(row["weights_bytes"]),
            size(row["floor_bytes"]),
            str(row["context_tokens"]),
            kv_wording.short(kv_wording.of_listed(row["kv_kinds"])),
            size(row["quota_bytes"]),
            row["path"],
            ", ".join(row["aliases"]),
        )
        lines.append(Row(cells, fault(row)))
    show_table(rows, json_, columns, lines)


@cli.command(app, "prismctl models add my-model /models/my-model --check", "add")
def add_model(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name by which clients will ask for the model.")],
    path: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Hugging Face folder of the model, on the loader's node.")
    ],
    ttft_ms: Annotated[int, typer.Option(help="Default target of its requests' first token; 0: none.")] = 0,
    tpot_ms: Annotated[int, typer.Option(help="Default target per further token; 0: none.")] = 0,
    pinned: Annotated[bool, typer.Option("--pinned", help="Never evict the model.")] = False,
    engine: Annotated[str, typer.Option(help="sglang or echo; left out: the groups' own default.")] = "",
    context_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of the longest request, fewer than the checkpoint's to need less memory.",
            show_default="the checkpoint's",
        ),
    ] = 0,
    floor_tokens: Annotated[
        int, typer.Option(help="Tokens of KV that the model always has while active; default: those of one request.")
    ] = 0,
    quota: Annotated[str, typer.Option(help="Private memory of its engine on each device, e.g. 1MiB.")] = "",
    devices: Annotated[
        int, typer.Option(help="Number of devices of a group that the model is spread over: 1, 2 or 4.")
    ] = 1,
    most_replicas: Annotated[
        int, typer.Option(help="Most groups that serve it at once; 0: as placement's setting says.")
    ] = 0,
    task: Annotated[str, typer.Option(help="embed, generate or rerank; by default what its folder says.")] = "",
    tool_parser: Annotated[
        str, typer.Option(help="How it calls tools (hermes); by default what its template says.")
    ] = "",
    reasoning_parser: Annotated[
        str, typer.Option(help="How it writes its reasoning (qwen3), or none; by default what its template says.")
    ] = "",
    kv_dtype: Annotated[str, typer.Option(help="fp8: KV of one byte a value, on GPUs.")] = "",
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Accept a class that nobody has compared with another implementation.")
    ] = False,
    base: Annotated[
        str, typer.Option(help="Model that this one is an adapter (LoRA) of; FOLDER is in PEFT's format.")
    ] = "",
    alias: Annotated[
        list[str] | None, typer.Option(help="A further name by which clients may ask for it; may be repeated.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Report what it needs and whether it fits; add nothing.")
    ] = False,
    json_: Json = False,
) -> None:
    """Add a model to the running system. Its folder is checked first; its first request loads it. It stays until it is
    removed, beside those of the catalogue file. The same name and path again: its files are read afresh, and it has
    the settings and aliases that are given then."""
    system: SystemAddresses = context.obj
    entry = listed(
        name=name,
        path=absolute(path),
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        pinned=pinned,
        engine=engine,
        context_tokens=context_tokens,
        floor_tokens=floor_tokens,
        quota_bytes=parse_size(quota) if quota else None,
        devices=devices,
        most_replicas=most_replicas,
        task=task,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        kv_dtype=kv_dtype,
        unverified=unverified,
        base=base,
        aliases=tuple(alias or ()),
    )
    common = entry.model_dump(exclude={"ttft_ms", "tpot_ms"})
    slo = common_pb2.Slo(ttft_ms=entry.ttft_ms, tpot_ms=entry.tpot_ms)
    listing = common_pb2.ModelListing(**common, default_slo=slo)

    async def ask() -> common_pb2.ModelSpec:
        async with system.open_placement() as placement, system.attending(system.node()):
            return await placement.add_model(listing, check_only=check)

    spec = values.spec(run(ask()))
    if spec["base"]:
        done = "could be added" if check else "is added"
        text = f"{name} {done}: an adapter of {spec['base']}, rank {spec['rank']}, {size(spec['weights_bytes'])}"
        show(spec | {"added": not check}, json_, text)
        return
    needs = " + ".join(f"{title} {size(spec[key])}" for title, key in _FIELDS)
    total = size(sum(spec[key] for _, key in _FIELDS))
    done = "could be added" if check else "is added"
    kind = f"{spec['architecture']}{f', {how}' if (how := spec['quantisation']) else ''}"
    text = f"{name} {done}: {kind}, context {spec['context_tokens']}; {needs} = {total}"
    if spec["unverified"]:
        text += ". Its class is UNVERIFIED: nobody has compared its answers with another implementation's"
    show(spec | {"added": not check}, json_, text)


def absolute(folder: str) -> str:
    """The absolute path of a folder. Raises BadParameter for the name of a model of the hub, which is to be fetched
    first."""
    path = os.path.abspath(os.path.expanduser(folder))
    try:
        model = None if os.path.exists(path) else hub_names.parse(folder)
    except Invalid as error:
        raise typer.BadParameter(f"FOLDER: {error}") from None
    if model is not None:
        raise typer.BadParameter(
            f"FOLDER: there is no folder {folder} here; a model of the Hugging Face hub is fetched first, where the "
            f"loader runs: prism fetch {folder} prints its folder"
        )
    return path


def listed(**given: Any) -> CatalogueEntry:
    """A checked catalogue entry, as the loader would make it. Raises BadParameter that names the faulty option."""
    try:
        return CatalogueEntry(**given)
    except pydantic.ValidationError as error:
        fault = faults(error)[0]
        if fault.key == "name":
            raise typer.BadParameter(fault.what) from None
        key = "alias" if fault.at[:1] == ("aliases",) else fault.key
        option = {"path": "FOLDER", "quota_bytes": "--quota"}.get(key, "--" + key.replace("_", "-"))
        raise typer.BadParameter(f"{option}: {fault.what}" if fault.at else fault.what) from None


@cli.command(app, "prismctl models remove my-model --force", "remove")
def remove_model(
    context: typer.Context,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Do it even if the model is pinned or has requests.")] = False,
    json_: Json = False,
) -> None:
    """Take a model out of the running system. One that is pinned, or has requests, is refused unless forced: then new
    requests are told that there is none, what runs may finish for a while, and its memory is free. One that the
    catalogue file names is back when that is read again."""
    system: SystemAddresses = context.obj

    async def ask() -> None:
        async with system.open_placement() as placement:
            async with system.attending([*system.node(), *await system.groups(placement, name)]):
                await placement.remove_model(name, force)

    run(ask())
    show({"model": name, "removed": True}, json_, f"{name} is removed")


@cli.command(app, "prismctl models pin llama-debian", "pin")
def pin_model(context: typer.Context, name: Name, json_: Json = False) -> None:
    """Keep a model's image in host memory. Whatever others need, until it is unpinned. One that can have no image
    beside those that are pinned is refused."""
    _pin(context.obj, name, True, json_)


@cli.command(app, "prismctl models unpin llama-debian", "unpin")
def unpin_model(context: typer.Context, name: Name, json_: Json = False) -> None:
    """Let the image of a model give way to others' again."""
    _pin(context.obj, name, False, json_)


def _pin(system: SystemAddresses, name: str, pinned: bool, json_: bool) -> None:
    async def ask() -> None:
        async with system.open_loader() as loader:
            await (loader.pin(name) if pinned else loader.unpin(name))

    run(ask())
    text = f"the image of {name} is {'' if pinned else 'not '}pinned"
    show({"model": name, "image_pinned": pinned}, json_, text)


@cli.command(app, "prismctl models inspect llama-debian --json", "inspect")
def inspect_model(context: typer.Context, name: Name, json_: Json = False) -> None:
    """Where a model's weights are, what is under way."""
    system: SystemAddresses = context.obj

    async def ask() -> dict[str, Any]:
        async with system.open_loader() as loader:
            return values.inspection(await loader.state(name))

    seen = run(ask())
    if json_:
        show_json(seen)
        return
    if seen["base"]:
        typer.echo(f"{name}: an adapter of {seen['base']}, rank {seen['rank']}, {size(seen['weights_bytes'])}")
        return
    where = [place for place, there in (("in memory", seen["in_memory"]), ("on disk", seen["on_disk"])) if there]
    none = f"none: {seen['no_image']}" if seen["no_image"] else "none"
    image = f"{size(seen['image_bytes'])} {' and '.join(where)}" if where else none
    typer.echo(f"{name}: image {image}{', pinned' if seen['image_pinned'] else ''}")
    columns = (
        Column("under way"),
        Column("step"),
        Column("done", right=True),
        Column("of", right=True),
        Column("a second", 1, right=True),
        Column("left", 1, right=True),
        Column("callers", 2, right=True),
        Column("lease", 3),
    )
    rows = []
    for each in seen["under_way"]:
        cells = (
            each["kind"],
            each["step"],
            size(each["done_bytes"]),
            size(each["total_bytes"]),
            "" if each["bytes_per_s"] is None else size(each["bytes_per_s"]),
            "" if each["left_s"] is None else f"{each['left_s']:.1f} s",
            str(each["callers"]),
            each["lease"],
        )
        rows.append(Row(cells))
    if rows:
        typer.echo(render(columns, rows, width()))
