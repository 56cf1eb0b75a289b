"""`prismctl explain`: why a model is where it is, asleep, refused or waiting."""

from __future__ import annotations

import asyncio
import textwrap
from typing import Annotated, Any

import typer

from prismctl.system.system import UNREACHABLE, SystemAddresses, run
from prismctl.views import values
from prismctl.views.account import account
from prismctl.views.tables import Column, Row, render
from prismctl.views.terminal import Json, show_json, show_table, width
from services.errors import NotFound, Unavailable

_LOOKED_AT = 10
"""Number of decisions among which the one is looked for that brought a model where it is, however many are shown."""
_COLUMNS = (
    Column("age", right=True),
    Column("model"),
    Column("action"),
    Column("group"),
    Column("outcome", 1),
)


def explain(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Model whose decisions to list; default: all models.")
    ] = "",
    last: Annotated[int, typer.Option(min=0, max=100_000, help="Number of decisions to list; 0: none.")] = 10,
    json_: Json = False,
) -> None:
    """Why a model is where it is, or waits. Or sleeps, or is refused; and the last decisions, newest first. Status 3
    when one of those that know does not answer; what the others say is shown."""
    system: SystemAddresses = context.obj
    if not model:
        decisions = run(_all(system, last)) if last else []
        show_table(decisions, json_, _COLUMNS, map(_row, decisions))
        return
    known = run(_one(system, model, max(last, _LOOKED_AT)))
    value = known | {"account": account(known), "decisions": known["decisions"][:last]}
    if json_:
        show_json(value)
    else:
        for line in value["account"]:
            typer.echo("\n".join(textwrap.wrap(line, width(), subsequent_indent="  ", break_long_words=False)))
        if value["decisions"]:
            typer.echo("\n" + render(_COLUMNS, map(_row, value["decisions"]), width()))
    if known["silent"] or not all(place["answers"] for place in known["places"]):
        raise typer.Exit(UNREACHABLE)


async def _all(system: SystemAddresses, last: int) -> list[dict[str, Any]]:
    async with system.open_placement() as placement:
        return values.decisions(await placement.explain("", last))


async def _one(system: SystemAddresses, model: str, last: int) -> dict[str, Any]:
    """What placement and the groups that have the model report about it, and which processes of the node do not answer.
    Raises NotFound."""
    async with system.open_placement() as placement:
        routes, cluster = await placement.routes(), await placement.cluster()
        answer = await placement.explanation(model, last)
    node = system.node()
    problems = await asyncio.gather(*(each.problem(system.wait_s) for each in node))
    route = next((each for each in values.models(routes) if each["model"] == model), None)
    if route is None:
        raise NotFound(f"no model {model!r} in the catalogue")
    places, requests, resident = [], [], route["base"] or model
    for group in cluster.groups:
        if not any(each.model == resident for each in group.models):
            continue
        if not group.reachable:
            places.append({"group": group.group, "answers": False, "problem": None})
            continue
        try:
            async with system.open_group(group.group, group.address) as client:
                state, queue = await client.state(), await client.inspect()
        except Unavailable as error:
            places.append({"group": group.group, "answers": False, "problem": str(error)})
            continue
        places += [values.place(group.group, each) for each in state.residents if each.model == resident]
        requests += [values.request(each, group.group) for each in queue.requests if each.model == model]
    return {
        "model": model,
        "state": route["state"],
        "error": route["error"] or None,
        "retry_s": route["retry_s"],
        "path": route["path"],
        "base": route["base"],
        "no_image": route["no_image"],
        "places": places,
        "requests": requests,
        "prospect": values.prospect(answer.prospect) if answer.HasField("prospect") else None,
        "kept": answer.kept,
        "decisions": values.decisions(answer.decisions),
        "silent": [each.silent(problem) for each, problem in zip(node, problems, strict=True) if problem],
    }


def _row(decision: dict[str, Any]) -> Row:
    outcome, _, why = decision["outcome"].partition(": ")
    cells = (f"{decision['age_s']:.0f} s", decision["model"], decision["action"], decision["group"], outcome)
    return Row(cells, "; ".join(filter(None, (decision["reason"], why))))
