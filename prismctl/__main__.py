"""`prismctl`: see `prismctl --help`."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from gpu_scheduler.client import GpuSchedulerClient
from placement.client import PlacementClient
from prismctl import views
from protos import common_pb2, placement_pb2
from services.errors import NotFound, PrismError

app = typer.Typer(help="Look at a Prism system and steer it.", no_args_is_help=True, add_completion=False)
console = Console()
T = TypeVar("T")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMG]i?B?|B)?$", re.IGNORECASE)
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


class Options:
    """Where placement is; set by the callback."""

    placement = ""


@app.callback()
def main_options(
    state: Annotated[Path, typer.Option(help="Folder of a local system's sockets.", envvar="PRISM_STATE")] = Path(
        ".run"
    ),
    placement: Annotated[str, typer.Option(help="Placement's gRPC address.", envvar="PRISM_PLACEMENT")] = "",
) -> None:
    Options.placement = placement or f"unix:{state.resolve() / 'placement.sock'}"


def _ask(question: Callable[[PlacementClient], Awaitable[T]]) -> T:
    """Puts a question to placement; an error ends the command with one line."""

    async def asking() -> T:
        client = PlacementClient(Options.placement)
        try:
            return await question(client)
        finally:
            await client.close()

    try:
        return asyncio.run(asking())
    except PrismError as error:
        typer.echo(f"prismctl: {error}", err=True)
        raise typer.Exit(1) from None


def plain_table(*columns: str) -> Table:
    """A table without lines, which fits a narrow terminal and survives a pipe; names are never cut."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        result.add_column(column, no_wrap=column in ("group", "model", "state"), overflow="fold")
    return result


def _show(value: Any, as_json: bool, table: Callable[[], Table]) -> None:
    if as_json:
        typer.echo(json.dumps(value, indent=2, allow_nan=True))
    else:
        console.print(table())


@app.command()
def status(json_: Json = False) -> None:
    """Groups, their memory, and what each model does there."""
    groups = views.cluster(_ask(lambda placement: placement.cluster()))

    def table() -> Table:
        result = plain_table(
            "group", "memory", "free", "pressure", "model", "state", "waiting", "running", "KV held / limit", "idle"
        )
        for group in groups:
            first = [
                group["group"] + ("" if group["reachable"] else " (away)"),
                views.size(group["capacity_bytes"]),
                views.size(group["free_bytes"]),
                f"{group['pressure']:.3g}",
            ]
            for model in group["models"] or [None]:
                row = (
                    [
                        model["model"],
                        model["state"],
                        str(model["waiting"]),
                        str(model["running"]),
                        f"{views.size(model['kv_held_bytes'])} / {views.size(model['kv_limit_bytes'])}",
                        f"{model['idle_s']:.0f} s",
                    ]
                    if model
                    else ["–", "", "", "", "", ""]
                )
                result.add_row(*first, *row)
                first = ["", "", "", ""]
        return result

    _show(groups, json_, table)


@app.command()
def models(json_: Json = False) -> None:
    """The catalogue: states, sizes, errors."""
    rows = views.models(_ask(lambda placement: placement.routes()))

    def table() -> Table:
        result = plain_table("model", "state", "places", "weights", "KV per token", "floor", "context", "error")
        for row in rows:
            result.add_row(
                row["model"] + (" (pinned)" if row["pinned"] else ""),
                row["state"],
                ", ".join(row["places"]),
                views.size(row["weights_bytes"]),
                views.size(row["kv_bytes_per_token"]),
                views.size(row["floor_bytes"]),
                str(row["context_tokens"]),
                row["error"],
            )
        return result

    _show(rows, json_, table)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="A model; all when left out.")] = "",
    last: Annotated[int, typer.Option(help="How many decisions.")] = 10,
    json_: Json = False,
) -> None:
    """Why models are where they are: the last decisions, newest first."""
    rows = views.decisions(_ask(lambda placement: placement.explain(model, last)))

    def table() -> Table:
        result = plain_table("age", "model", "action", "group", "reason", "outcome")
        for row in rows:
            result.add_row(
                f"{row['age_s']:.0f} s", row["model"], row["action"], row["group"], row["reason"], row["outcome"]
            )
        return result

    _show(rows, json_, table)


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

    def table() -> Table:
        result = plain_table("group", "state", "revision", "held", "above the limit")
        for group, answer in answers.items():
            result.add_row(
                group,
                answer["state"],
                str(answer["revision"]),
                views.size(answer["held_bytes"]),
                views.size(answer["overage_bytes"]),
            )
        return result

    _show(answers, json_, table)


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
