"""`prismctl top` and `prismctl status`: the whole system, live or once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from prismctl.system.look import SystemSnapshots, all_answer
from prismctl.system.system import UNREACHABLE, SystemAddresses, run
from prismctl.views import frame
from prismctl.views.terminal import Json, show, width

_STYLES = (
    (r"^(does not answer|error|.* says): .*$", "red"),
    (r"^[^\s].*: .* free.*$", "bold"),
    (r"\b(active)\b", "green"),
    (r"\b(waking|draining)\b", "yellow"),
)


def top(
    context: typer.Context,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, without clearing the screen.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.1, help="Seconds from frame to frame.")] = 1.0,
    json_: Json = False,
) -> None:
    """Bytes by owner, queues, residencies, live. Until Ctrl-C; where the output is no terminal, frame after frame as
    plain lines; with --json an object a line. What does not answer is named, the rest is shown; with --once the status
    then is 3."""
    system: SystemAddresses = context.obj
    if once:
        _show_once(system, frame.top, json_)
        return
    with contextlib.suppress(KeyboardInterrupt):  # how a user ends it
        run(_lines(system, every_s, json_) if json_ or not sys.stdout.isatty() else _screen(system, every_s))


def status(context: typer.Context, json_: Json = False) -> None:
    """Services, groups, their memory and models. Status 3 when a service does not answer."""
    _show_once(context.obj, frame.status, json_)


def _show_once(system: SystemAddresses, text: Callable[[Mapping[str, Any], int], str], as_json: bool) -> None:
    async def look() -> dict[str, Any]:
        async with SystemSnapshots(system) as looking:
            return await looking.look()

    seen = run(look())
    show(seen, as_json, text(seen, width()))
    if not all_answer(seen):
        raise typer.Exit(UNREACHABLE)


async def _lines(system: SystemAddresses, every_s: float, as_json: bool) -> None:
    async for seen in _looks(system, every_s):
        typer.echo(json.dumps(seen) if as_json else frame.top(seen, width()) + "\n")
        sys.stdout.flush()


async def _screen(system: SystemAddresses, every_s: float) -> None:
    console = Console(highlight=False)
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        async for seen in _looks(system, every_s):
            live.update(styled(frame.top(seen, console.width)), refresh=True)


def styled(text: str) -> Text:
    """The lines of a frame, coloured for a terminal."""
    painted = Text(text, no_wrap=True)
    for pattern, style in _STYLES:
        painted.highlight_regex("(?m)" + pattern, style)
    return painted


async def _looks(system: SystemAddresses, every_s: float) -> AsyncIterator[dict[str, Any]]:
    """A look every `every_s` seconds, however long looking takes, for ever."""
    loop = asyncio.get_running_loop()
    async with SystemSnapshots(system) as looking:
        while True:
            began = loop.time()
            yield await looking.look()
            await asyncio.sleep(max(0.0, began + every_s - loop.time()))
