"""`prismctl`: see `prismctl --help`."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gpu_scheduler.client import GpuSchedulerClient
from loader.client import LoaderClient
from placement.client import PlacementClient
from prismctl import views
from prismctl.plan import plan
from prismctl.tables import Column, Row, Section, render
from prismctl.terminal import show_json, width
from protos import common_pb2, placement_pb2
from services.errors import NotFound, PrismError

app = typer.Typer(help="Look at a Prism system and steer it.", no_args_is_help=True, add_completion=False)
models_app = typer.Typer(invoke_without_command=True)
app.add_typer(models_app, name="models")
app.command()(plan)
T = TypeVar("T")
C = TypeVar("C", PlacementClient, LoaderClient)
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMG]i?B?|B)?$", re.IGNORECASE)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


class Options:
    """Where placement and the loader are; set by the callback."""

    placement = ""
    loader = ""


@app.callback()
def main_options(
    state: Annotated[Path, typer.Option(help="Folder of a local system's sockets.", envvar="PRISM_STATE")] = Path(
        ".run"
    ),
    placement: Annotated[str, typer.Option(help="Placement's gRPC address.", envvar="PRISM_PLACEMENT")] = "",
    loader: Annotated[str, typer.Option(help="The loader's gRPC address.", envvar="PRISM_LOADER")] = "",
) -> None:
    Options.placement = placement or f"unix:{state.resolve() / 'placement.sock'}"
    Options.loader = loader or f"unix:{state.resolve() / 'loader.sock'}"


def _ask(question: Callable[[PlacementClient], Awaitable[T]]) -> T:
    """Puts a question to placement."""
    return _put(question, lambda: PlacementClient(Options.placement))


def _ask_loader(question: Callable[[LoaderClient], Awaitable[T]]) -> T:
    return _put(question, lambda: LoaderClient(Options.loader))


def _put(question: Callable[[C], Awaitable[T]], connect: Callable[[], C]) -> T:
    """An error ends the command with one line and status 1."""

    async def asking() -> T:
        client = connect()
        try:
            return await question(client)
        finally:
            await client.close()

    try:
        return asyncio.run(asking())
    except PrismError as error:
        typer.echo(f"prismctl: {error}", err=True)
        raise typer.Exit(1) from None


def _show(value: Any, as_json: bool, columns: Sequence[Column], lines: Iterable[Row | Section]) -> None:
    if as_json:
        show_json(value)
    else:
        typer.echo(render(columns, lines, width()))


@app.command()
def status(json_: Json = False) -> None:
    """Groups, their memory, and what each model does there."""
    groups = views.cluster(_ask(lambda placement: placement.cluster()))
    columns = (
        Column("model"),
        Column("state"),
        Column("waiting", right=True),
        Column("running", right=True),
        Column("KV held", right=True),
        Column("KV limit", 1, right=True),
        Column("idle", 2, right=True),
        Column("tokens/s", 3, right=True),
        Column("weights", 4, right=True),
        Column("demand", 5, right=True),
    )
    lines: list[Row | Section] = []
    for group in groups:
        memory = f"{views.size(group['free_bytes'])} of {views.size(group['capacity_bytes'])} free"
        away = "" if group["reachable"] else " (away)"
        lines.append(Section(f"{group['group']}{away}: {memory}, pressure {group['pressure']:.3g}"))
        for model in group["models"]:
            cells = (
                model["model"],
                model["state"],
                str(model["waiting"]),
                str(model["running"]),
                views.size(model["kv_held_bytes"]),
                views.size(model["kv_limit_bytes"]),
                f"{model['idle_s']:.0f} s",
                f"{model['tokens_per_s']:.0f}",
                views.size(model["weights_bytes"]),
                f"{model['demand']:.3g}",
            )
            lines.append(Row(cells))
    _show(groups, json_, columns, lines)


@models_app.callback()
def models(context: typer.Context, json_: Json = False) -> None:
    """The catalogue: states, sizes, errors. With a command: changes it."""
    if context.invoked_subcommand is not None:
        return
    rows = views.models(_ask(lambda placement: placement.routes()))
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
    )
    lines = []
    for row in rows:
        cells = (
            row["model"] + (" (pinned)" if row["pinned"] else ""),
            row["state"],
            ", ".join(row["places"]),
            views.size(row["weights_bytes"]),
            views.size(row["floor_bytes"]),
            str(row["context_tokens"]),
            views.size(row["kv_bytes_per_token"]),
            views.size(row["quota_bytes"]),
            row["path"],
        )
        lines.append(Row(cells, row["error"]))
    _show(rows, json_, columns, lines)


@models_app.command("add")
def add_model(
    name: Annotated[str, typer.Argument(help="As clients will call it.")],
    path: Annotated[str, typer.Argument(help="Its Hugging Face folder, on the loader's node.")],
    ttft_ms: Annotated[int, typer.Option(help="Default target of its requests' first token; 0: none.")] = 0,
    tpot_ms: Annotated[int, typer.Option(help="Default target per further token; 0: none.")] = 0,
    pinned: Annotated[bool, typer.Option("--pinned", help="Never evicted.")] = False,
    engine: Annotated[str, typer.Option(help="sglang or echo; left out: the groups' own default.")] = "",
    context_tokens: Annotated[int, typer.Option(help="Shorter than the checkpoint's, to need less memory.")] = 0,
    floor_tokens: Annotated[int, typer.Option(help="KV that it keeps while active: the context, or more.")] = 0,
    quota: Annotated[str, typer.Option(help="Private memory of its engine on each device, e.g. 1MiB.")] = "",
    devices: Annotated[int, typer.Option(help="Of one group, that it is spread over: 1, 2 or 4.")] = 1,
    json_: Json = False,
) -> None:
    """Add a model to the running system; its first request loads it. It stays until it is removed, beside those of the
    catalogue file. The same name and path again: its files are read afresh."""
    listing = common_pb2.ModelListing(
        name=name,
        path=os.path.abspath(os.path.expanduser(path)),
        default_slo=common_pb2.Slo(ttft_ms=ttft_ms, tpot_ms=tpot_ms),
        pinned=pinned,
        engine=engine,
        context_tokens=context_tokens,
        floor_tokens=floor_tokens,
        quota_bytes=parse_size(quota) if quota else None,
        devices=devices,
    )
    spec = views.spec(_ask(lambda placement: placement.add_model(listing)))
    if json_:
        show_json(spec)
        return
    parts = (("weights", "weights_bytes"), ("floor", "floor_bytes"), ("engine quota", "quota_bytes"))
    needs = " + ".join(f"{title} {views.size(spec[key])}" for title, key in parts)
    total = views.size(sum(spec[key] for _, key in parts))
    typer.echo(f"{name} is added: {spec['architecture']}, context {spec['context_tokens']}; {needs} = {total}")


@models_app.command("remove")
def remove_model(
    name: Annotated[str, typer.Argument()],
    force: Annotated[bool, typer.Option("--force", help="Also a pinned one.")] = False,
    json_: Json = False,
) -> None:
    """Take a model out of the running system: new requests are told that there is none, what runs may finish for a
    while, then its memory is free. One that the catalogue file names is back when that is read again."""
    _ask(lambda placement: placement.remove_model(name, force))
    if json_:
        show_json({"model": name, "removed": True})
    else:
        typer.echo(f"{name} is removed")


@models_app.command("pin")
def pin_model(name: Annotated[str, typer.Argument()]) -> None:
    """Keep the image of a model in host memory, whatever others need, until it is unpinned."""
    _ask_loader(lambda loader: loader.pin(name))
    typer.echo(f"the image of {name} is pinned")


@models_app.command("unpin")
def unpin_model(name: Annotated[str, typer.Argument()]) -> None:
    """Let the image of a model give way to others' again."""
    _ask_loader(lambda loader: loader.unpin(name))
    typer.echo(f"the image of {name} is not pinned")


@models_app.command("inspect")
def inspect_model(name: Annotated[str, typer.Argument()], json_: Json = False) -> None:
    """Where the weights of a model are, and what is under way with them."""
    seen = views.inspection(_ask_loader(lambda loader: loader.state(name)))
    if json_:
        show_json(seen)
        return
    where = [place for place, there in (("in memory", seen["in_memory"]), ("on disk", seen["on_disk"])) if there]
    image = f"{views.size(seen['image_bytes'])} {' and '.join(where)}" if where else "none"
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
            views.size(each["done_bytes"]),
            views.size(each["total_bytes"]),
            "" if each["bytes_per_s"] is None else views.size(each["bytes_per_s"]),
            "" if each["left_s"] is None else f"{each['left_s']:.1f} s",
            str(each["callers"]),
            each["lease"],
        )
        rows.append(Row(cells))
    if rows:
        typer.echo(render(columns, rows, width()))


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A model; all when left out.")] = "",
    last: Annotated[int, typer.Option(help="How many decisions.")] = 10,
    json_: Json = False,
) -> None:
    """Why models are where they are: the last decisions, newest first."""
    rows = views.decisions(_ask(lambda placement: placement.explain(model, last)))

    columns = (
        Column("age", right=True),
        Column("model"),
        Column("action"),
        Column("group"),
        Column("outcome", 1),
    )
    lines = []
    for row in rows:
        outcome, _, why = row["outcome"].partition(": ")
        cells = (f"{row['age_s']:.0f} s", row["model"], row["action"], row["group"], outcome)
        lines.append(Row(cells, "; ".join(filter(None, (row["reason"], why)))))
    _show(rows, json_, columns, lines)


def parse_size(text: str) -> int:
    """Bytes of "12MiB", "1.5g", "4096", or -1 for "none"."""
    if text.lower() in ("none", "-1"):
        return -1
    match = _SIZE.match(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 12MiB, 1.5GiB, 4096, or none")
    power = {"": 0, "b": 0, "k": 1, "m": 2, "g": 3}[(match[2] or "")[:1].lower()]
    return int(float(match[1]) * 1024**power)


@app.command()
def limit(
    model: Annotated[str, typer.Argument()],
    size: Annotated[str, typer.Argument(help="Most KV it may hold: 12MiB, 1GiB, or none.")],
    json_: Json = False,
) -> None:
    """Limit the KV memory of a model, on every group that has it."""
    count = parse_size(size)

    async def apply(placement: PlacementClient) -> dict[str, Any]:
        cluster: placement_pb2.Cluster = await placement.cluster()
        addresses = {g.group: g.address for g in cluster.groups if any(m.model == model for m in g.models)}
        if not addresses:
            raise NotFound(f"{model} is on no group now")
        answers = {}
        for group, address in addresses.items():
            client = GpuSchedulerClient(address)
            try:
                answers[group] = views.limit(await client.set_limit(model, count))
            finally:
                await client.close()
        return answers

    answers = _ask(apply)

    columns = (
        Column("group"),
        Column("state"),
        Column("held", right=True),
        Column("above the limit", right=True),
        Column("revision", 1, right=True),
    )
    lines = [
        Row(
            (
                group,
                answer["state"],
                views.size(answer["held_bytes"]),
                views.size(answer["overage_bytes"]),
                str(answer["revision"]),
            )
        )
        for group, answer in answers.items()
    ]
    _show(answers, json_, columns, lines)


@app.command()
def evict(
    model: Annotated[str, typer.Argument()],
    to: Annotated[str, typer.Option(help="hibernating, cold or disk")] = "hibernating",
) -> None:
    """Bring a model down now; its next request brings it up again."""
    targets = {"hibernating": common_pb2.HIBERNATING, "cold": common_pb2.COLD, "disk": common_pb2.ON_DISK}
    if to not in targets:
        raise typer.BadParameter(f"--to is one of {', '.join(targets)}, not {to!r}")
    _ask(lambda placement: placement.evict(model, targets[to]))
    typer.echo(f"{model} is {to}")


@app.command()
def migrate(model: Annotated[str, typer.Argument()], group: Annotated[str, typer.Argument()]) -> None:
    """Move a model to another group; it serves all the while."""
    seconds = _ask(lambda placement: placement.migrate(model, group))
    typer.echo(f"{model} is on {group} after {seconds:.2f} s")


def main() -> None:
    app()


if __name__ == "__main__":
    main()
