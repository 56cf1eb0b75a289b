"""`prismctl drain`: empties a group."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from prismctl.system.system import NO, SystemAddresses, run
from prismctl.views.tables import Column, Row
from prismctl.views.terminal import Json, show, show_table, told_meanwhile


def drain(
    context: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Name of the group, as `prismctl status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let models come up on the group again.")] = False,
    json_: Json = False,
) -> None:
    """Empty a group and keep it empty. Active models move to where there is room, the others go cold. Until it is
    undone, or the group's gpu_scheduler starts anew. Status 1 when a model stays, with the reason."""
    system: SystemAddresses = context.obj

    async def ask() -> list[dict[str, Any]]:
        async with system.open_placement() as placement:
            there = [each for each in (await placement.cluster()).groups if each.group == group]
            asked = [*system.node(), *(system.asked(each.group, each.address) for each in there)]
            async with system.attending(asked):
                if undo:
                    await placement.undo_drain(group)
                    return []
                line = f"models leave {group}, those with requests once they are elsewhere or done"
                left = await told_meanwhile(placement.drain(group), line)
        return [{"model": each.model, "to_group": each.to_group or None, "error": each.error or None} for each in left]

    models = run(ask())
    if undo:
        show({"group": group, "drained": False}, json_, f"models may come up on {group} again")
        return
    stay = [each for each in models if each["error"]]
    value = {"group": group, "drained": True, "models": models}
    if models:
        lines = [Row((each["model"], _became(each)), each["error"] or "") for each in models]
        show_table(value, json_, (Column("model"), Column(f"on {group}")), lines)
    else:
        show(value, json_, f"{group} was empty; no model comes up there")
    if stay:
        raise typer.Exit(NO)


def _became(each: dict[str, Any]) -> str:
    if each["error"]:
        return "stays"
    return f"moved to {each['to_group']}" if each["to_group"] else "went cold"
