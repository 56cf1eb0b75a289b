"""`prismctl`: see `prismctl --help` and docs/prismctl.md."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from prismctl import config, keys, models, steer
from prismctl.drain import drain
from prismctl.explain import explain
from prismctl.logs import logs
from prismctl.plan import plan
from prismctl.system import USAGE, System, failed
from prismctl.top import status, top
from services import log, rpc, tls
from services.errors import PrismError

# Plain lines, whatever the terminal: help and errors are read by scripts and logs too.
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_COMMANDS: tuple[Callable[..., None], ...] = (status, top, explain, drain, logs, plan)
for command in _COMMANDS:
    app.command()(command)
_ON_MODELS: tuple[Callable[..., None], ...] = (steer.wake, steer.sleep, steer.move, steer.limit)
for command in _ON_MODELS:
    models.app.command()(command)
app.add_typer(models.app, name="models")
app.add_typer(config.app, name="config")
app.add_typer(keys.app, name="keys")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(importlib.metadata.version("prism-serve"))
        raise typer.Exit


@app.callback()
def main_options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Say it.", callback=_version, is_eager=True)] = False,
    state: Annotated[Path, typer.Option(help="Folder of a node's sockets.", envvar="PRISM_STATE")] = Path(".run"),
    placement: Annotated[str, typer.Option(help="Placement's gRPC address.", envvar="PRISM_PLACEMENT")] = "",
    loader: Annotated[str, typer.Option(help="The loader's.", envvar="PRISM_LOADER")] = "",
    balloond: Annotated[str, typer.Option(help="balloond's.", envvar="PRISM_BALLOOND")] = "",
    gateway: Annotated[str, typer.Option(help="A gateway's.", envvar="PRISM_GATEWAY")] = "",
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for a service that does not answer.")] = 2.0,
) -> None:
    """Look at a Prism system and steer it. Status: 0 done, 1 no, 2 the command line or a file, 3 a service does not
    answer, 4 another change is under way."""
    try:
        rpc.identify(tls.from_environment())
    except PrismError as error:
        raise failed(str(error), USAGE) from None
    context.obj = System(state, placement, loader, balloond, gateway, wait)


def main() -> None:
    log.configure("prismctl", "error")
    app()


if __name__ == "__main__":
    main()
