"""`prismctl models wake | sleep | move | replicate | limit`: what is done to a model of the running system."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from prismctl.system.coming_up import meanwhile
from prismctl.system.system import SystemAddresses, run
from prismctl.views import values
from prismctl.views.sizes import parse_size
from prismctl.views.tables import Column, Row
from prismctl.views.terminal import Json, show, show_table, tell, told_meanwhile
from protos import common_pb2, placement_pb2
from services.errors import NotFound, TimedOut
from services.wording.sizes import size

Name = Annotated[str, typer.Argument(metavar="MODEL")]
_DOWN = {"hibernating": common_pb2.HIBERNATING, "cold": common_pb2.COLD, "disk": common_pb2.ON_DISK}


def wake(
    context: typer.Context,
    name: Name,
    patience_s: Annotated[
        float, typer.Option("--patience", min=0.0, help="Seconds to wait until it is active.")
    ] = 600.0,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Return as soon as a group is chosen, before the model is active.")
    ] = False,
    json_: Json = False,
) -> None:
    """Bring a model up now. As for a request: where, and who makes way, is placement's choice. How far it is is shown
    meanwhile: a bar on a terminal, elsewhere a line every ten seconds."""
    system: SystemAddresses = context.obj

    async def ask() -> tuple[str, str]:
        async with system.open_placement() as placement:
            async with system.attending([*system.node(), *await system.groups(placement)]):
                place = await placement.activate(name)
            if no_wait:
                return place.group, "waking"
            try:
                attending = system.attending([*system.node(), system.asked(place.group, place.address)])
                async with asyncio.timeout(patience_s), attending:
                    return await meanwhile(placement, name, placement.until_active(name), tell), "active"
            except TimeoutError:
                raise TimedOut(f"{name} is not active after {patience_s:g} s; it is still waking") from None

    group, state = run(ask())
    show({"model": name, "group": group, "state": state}, json_, f"{name} is {state} on {group}")


def sleep(
    context: typer.Context,
    name: Name,
    to: Annotated[str, typer.Option(help="hibernating, cold or disk")] = "hibernating",
    group: Annotated[str, typer.Option(help="The group that it leaves. Left out: all that have it.")] = "",
    json_: Json = False,
) -> None:
    """Bring a model down now. Its next request brings it up again. What has no image of its weights can neither
    hibernate nor be cold: its engine is given back, and the next start reads the checkpoint. Of several groups that
    serve it, one can be named: the others serve on, and what runs there goes on at them."""
    system: SystemAddresses = context.obj
    if to not in _DOWN:
        raise typer.BadParameter(f"--to is one of {', '.join(_DOWN)}, not {to!r}")

    async def ask() -> placement_pb2.EvictResponse:
        async with system.open_placement() as placement:
            async with system.attending([*system.node(), *await system.groups(placement, name)]):
                return await placement.eviction(name, _DOWN[to], group)

    answer = run(ask())
    state, why = values.residency(answer.residency), answer.reason
    on = f" on {group}" if group else ""
    text = f"{name} is {state}{on}{f': {why}' if why else ''}"
    show({"model": name, "state": state, "group": group or None, "reason": why or None}, json_, text)


def move(
    context: typer.Context, name: Name, group: Annotated[str, typer.Argument(metavar="GROUP")], json_: Json = False
) -> None:
    """Move a model to another group; it serves all the while."""
    system: SystemAddresses = context.obj

    async def ask() -> float:
        async with system.open_placement() as placement:
            async with system.attending([*system.node(), *await system.groups(placement, name, group)]):
                moving = told_meanwhile(placement.migrate(name, group), f"{name} is on its way to {group}")
                return await meanwhile(placement, name, moving, tell)

    seconds = run(ask())
    show({"model": name, "group": group, "seconds": seconds}, json_, f"{name} is on {group} after {seconds:.2f} s")


def replicate(
    context: typer.Context,
    name: Name,
    group: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="Group for the model; default: placement chooses one.")
    ] = "",
    json_: Json = False,
) -> None:
    """Bring a model up on one group more, beside those that serve it. The model stays on all of them, however little it
    is asked for, until it is taken off one (`sleep --group`), idle where others want its memory, or placement ends."""
    system: SystemAddresses = context.obj

    async def ask() -> tuple[str, float]:
        async with system.open_placement() as placement:
            groups = await system.groups(placement, name, *([group] if group else []))
            async with system.attending([*system.node(), *groups]):
                where = f"to {group}" if group else "to one group more"
                coming = told_meanwhile(placement.replicate(name, group), f"{name} is on its way {where}")
                return await meanwhile(placement, name, coming, tell)

    came, seconds = run(ask())
    text = f"is on {came} too after {seconds:.2f} s" if seconds else f"was on {came} already, and stays there"
    show({"model": name, "group": came, "seconds": seconds}, json_, f"{name} {text}")


def limit(
    context: typer.Context,
    name: Name,
    most: Annotated[str, typer.Argument(metavar="SIZE", help="Most KV that the model may hold: 12MiB, 1GiB, or none.")],
    json_: Json = False,
) -> None:
    """Limit the KV memory of a model, on every group that has it. The limit lasts until another is set (none: no
    limit), or the group's gpu_scheduler starts again. It is no lower than the model's floor (models list)."""
    system: SystemAddresses = context.obj
    count = parse_size(most, none=True)

    async def ask() -> dict[str, Any]:
        async with system.open_placement() as placement:
            cluster, routes = await placement.cluster(), await placement.routes()
        addresses = {g.group: g.address for g in cluster.groups if any(m.model == name for m in g.models)}
        if name not in {route.model.name for route in routes.routes}:
            raise NotFound(f"no model {name!r} in the catalogue")
        if not addresses:
            raise NotFound(f"{name} is on no group now: a limit is for a model that is up or asleep")
        answers = {}
        for group, address in addresses.items():
            async with system.open_group(group, address) as client, system.attending(system.node()):
                answers[group] = values.limit(await client.set_limit(name, count))
        return answers

    answers = run(ask())
    columns = (
        Column("group"),
        Column("state"),
        Column("held", right=True),
        Column("above the limit", right=True),
        Column("revision", 1, right=True),
    )
    lines = []
    for group, answer in answers.items():
        held, above = size(answer["held_bytes"]), size(answer["overage_bytes"])
        lines.append(Row((group, answer["state"], held, above, str(answer["revision"]))))
    show_table(answers, json_, columns, lines)
